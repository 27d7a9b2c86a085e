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

_PIECE_TOKENS = 2048


class NgramHash:
    """The hash of one table, its constants laid out for the kernel: [ngram_size - 1, heads_per_ngram]."""

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
        newest = np.ascontiguousarray(tokens, np.int64).reshape(-1)
        rows = np.empty((len(newest), *self._sizes.shape), np.int64)
        self._fill(newest, self._padded(context), rows)
        return rows.reshape(len(newest), self.constants.heads)

    def pieces(self, tokens: npt.ArrayLike, context: npt.ArrayLike = ()) -> Iterator[Int64Array]:
        """`row_ids` of a long prompt, 2,048 tokens at a time.

        A piece is a view of one buffer, which stays in the processor's cache and which the next overwrites.
        """
        newest = np.ascontiguousarray(tokens, np.int64).reshape(-1)
        before = self._padded(context)
        buffer = np.empty((min(_PIECE_TOKENS, len(newest)), *self._sizes.shape), np.int64)
        for start in range(0, len(newest), _PIECE_TOKENS):
            piece = newest[start : start + _PIECE_TOKENS]
            rows = buffer[: len(piece)]
            self._fill(piece, before, rows)
            yield rows.reshape(len(piece), self.constants.heads)
            before = np.concatenate([before, piece])[-self.constants.context_length :]

    def _padded(self, context: npt.ArrayLike) -> Int64Array:
        """The full context, oldest first, EOS where ids are missing."""
        constants = self.constants
        before = np.asarray(context, np.int64).reshape(-1)
        missing = constants.context_length - len(before)
        if missing < 0:
            raise BadRequest(
                f"context holds {len(before)} ids, at most {constants.context_length} precede an n-gram"
            )
        return np.concatenate([np.full(missing, constants.eos_token_id, np.int64), before])

    def _fill(self, tokens: Int64Array, context: Int64Array, rows: Int64Array) -> None:
        _fill_row_ids(
            tokens, context, self._multipliers, self._sizes, self._offsets, self._reciprocals, self._wraps,
            self.constants.eos_token_id, rows,
        )  # fmt: skip


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
