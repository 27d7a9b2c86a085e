"""Token ids to row ids, bit for bit as transformers and vLLM compute them.

Row of head h at position p, with n the n-gram length of h:

    value[0] = token[p]
    value[s] = token[p - s], or EOS once a token at p - 1 .. p - s is EOS or lies before the sequence
    row      = floormod(xor over s < n of wrap64(value[s] * multiplier[s]), size[h]) + offset[h]

An EOS cuts what comes after it and not itself. Ids outside the vocabulary wrap in int64 and still land
inside their head's range.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from ple_daemon import barrett
from ple_daemon.barrett import floor_mod
from ple_daemon.hash_constants import HashConstants
from ple_rpc.errors import BadRequest

Int64Array = npt.NDArray[np.int64]


class NgramHash:
    """The hash of one table, with its constants laid out for the kernel."""

    def __init__(self, constants: HashConstants) -> None:
        self.constants = constants
        self._multipliers = np.array(constants.multipliers, np.int64)
        self._sizes = np.array(constants.head_sizes, np.int64)
        self._offsets = np.array(constants.head_offsets, np.int64)
        self._reciprocals = barrett.reciprocals(constants.head_sizes)
        self._wraps = barrett.wraps(constants.head_sizes)

    def row_ids(self, tokens: npt.ArrayLike, context: npt.ArrayLike = ()) -> Int64Array:
        """Rows of every token, int64 [tokens, heads].

        `context` holds up to ngram_size - 1 raw ids before tokens[0], oldest first; missing ones are EOS.
        Raises BadRequest for a longer context.
        """
        constants = self.constants
        newest = np.ascontiguousarray(tokens, np.int64).reshape(-1)
        before = np.asarray(context, np.int64).reshape(-1)
        missing = constants.context_length - len(before)
        if missing < 0:
            raise BadRequest(
                f"context holds {len(before)} ids, at most {constants.context_length} precede an n-gram"
            )
        padded = np.concatenate([np.full(missing, constants.eos_token_id, np.int64), before])
        rows = np.empty((len(newest), constants.heads), np.int64)
        _fill_row_ids(
            newest, padded, self._multipliers, self._sizes, self._offsets, self._reciprocals, self._wraps,
            constants.eos_token_id, rows,
        )  # fmt: skip
        return rows


@njit(nogil=True, cache=True)
def _fill_row_ids(  # noqa: PLR0913, PLR0917 - a kernel takes arrays, not objects
    tokens: Int64Array,
    context: Int64Array,
    multipliers: Int64Array,
    sizes: Int64Array,
    offsets: Int64Array,
    reciprocals: npt.NDArray[np.uint64],
    wraps: npt.NDArray[np.uint64],
    eos: int,
    rows: Any,
) -> None:
    depth = context.size
    heads_per_ngram = sizes.size // depth
    for position in range(tokens.size):
        mixed = tokens[position] * multipliers[0]
        cut = False
        for step in range(1, depth + 1):
            at = position - step
            value = tokens[at] if at >= 0 else context[depth + at]
            cut = cut or value == eos
            mixed ^= (eos if cut else value) * multipliers[step]
            for head in range((step - 1) * heads_per_ngram, step * heads_per_ngram):
                rest = floor_mod(mixed, sizes[head], reciprocals[head], wraps[head])
                rows[position, head] = rest + offsets[head]
