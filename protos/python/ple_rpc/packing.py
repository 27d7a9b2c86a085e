"""Token and row ids as the wire carries them: little-endian int32 and int64."""

import sys
from array import array
from collections.abc import Iterable


def _pack(typecode: str, values: Iterable[int]) -> bytes:
    packed = array(typecode, values)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def tokens_le32(tokens: Iterable[int]) -> bytes:
    """Token ids as little-endian int32. Raises OverflowError for an id that does not fit."""
    return _pack("i", tokens)


def row_ids_le64(row_ids: Iterable[int]) -> bytes:
    """Row ids as little-endian int64."""
    return _pack("q", row_ids)
