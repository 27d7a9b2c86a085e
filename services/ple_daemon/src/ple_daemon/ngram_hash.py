"""Token ids to row ids, bit for bit as transformers and vLLM compute them.

Row of head h at position p, with n the n-gram length of h:

    value[0] = token[p]
    value[s] = token[p - s], or EOS once a token at p - 1 .. p - s is EOS or lies before the sequence
    row      = floormod(xor over s < n of wrap64(value[s] * multiplier[s]), size[h]) + offset[h]

An EOS cuts what comes after it and not itself. Ids outside the vocabulary wrap in int64 and still land
inside their head's range.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from ple_daemon import barrett
from ple_daemon.barrett import floor_mod
from ple_daemon.hash_constants import HashConstants
from ple_rpc.errors import BadRequest

Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]

_PIECE_TOKENS = 1024


class NgramHash:
    """The hash of one table, with its constants laid out for the kernel: [ngram_size - 1, heads_per_ngram]."""

    def __init__(self, constants: HashConstants) -> None:
        self.constants = constants
        shape = constants.context_length, constants.heads_per_ngram
        self._multipliers = np.array(constants.multipliers, np.int64)
        self._sizes = np.array(constants.head_sizes, np.uint64).reshape(shape)
        self._offsets = np.array(constants.head_offsets, np.uint64).reshape(shape)
        self._reciprocals = barrett.reciprocals(constants.head_sizes).reshape(shape)
        self._wraps = barrett.wraps(constants.head_sizes).reshape(shape)

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
        rows = np.empty((len(newest), *self._sizes.shape), np.int64)
        _fill_row_ids(
            newest, padded, self._multipliers, self._sizes, self._offsets, self._reciprocals, self._wraps,
            constants.eos_token_id, rows,
        )  # fmt: skip
        return rows.reshape(len(newest), constants.heads)

    def pieces(self, tokens: npt.NDArray[Any], context: npt.ArrayLike = ()) -> Iterator[Int64Array]:
        """`row_ids` of a long prompt, 1,024 tokens at a time: the rows stay in the processor's cache."""
        for start in range(0, len(tokens), _PIECE_TOKENS):
            if start:
                context = tokens[max(0, start - self.constants.context_length) : start]
            yield self.row_ids(tokens[start : start + _PIECE_TOKENS], context)


@njit(nogil=True, cache=True)
def _fill_row_ids(  # noqa: PLR0913, PLR0917 - a kernel takes arrays, not objects
    tokens: Int64Array,
    context: Int64Array,
    multipliers: Int64Array,
    sizes: UInt64Array,
    offsets: UInt64Array,
    reciprocals: UInt64Array,
    wraps: UInt64Array,
    eos: int,
    rows: Any,
) -> None:
    depth, heads = sizes.shape
    for position in range(tokens.size):
        mixed = tokens[position] * multipliers[0]
        cut = False
        for step in range(depth):
            at = position - step - 1
            value = tokens[at] if at >= 0 else context[depth + at]
            cut = cut or value == eos
            mixed ^= (eos if cut else value) * multipliers[step + 1]
            for head in range(heads):
                rest = floor_mod(mixed, sizes[step, head], reciprocals[step, head], wraps[step, head])
                rows[position, step, head] = np.int64(rest + offsets[step, head])
