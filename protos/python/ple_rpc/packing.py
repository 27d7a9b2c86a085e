"""Token and row ids as the wire carries them, little-endian int32 and int64; any buffer as flat bytes."""

import sys
from array import array
from collections.abc import Iterable
from typing import Any

from ple_rpc.errors import BadRequest


def _pack(typecode: str, values: Iterable[int]) -> bytes:
    packed = array(typecode, values)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def tokens_le32(tokens: Iterable[int]) -> bytes:
    """Token ids as little-endian int32. Raises OverflowError for an id that does not fit."""
    return _pack("i", tokens)


def row_ids_le64(row_ids: Any) -> memoryview:
    """Row ids as flat bytes of little-endian int64.

    Taken without a copy from whatever has a contiguous buffer of int64 (an array, a tensor's numpy view) or
    of plain bytes; packed from lists, tuples and ranges. Raises BadRequest for a buffer of anything else.
    """
    if isinstance(row_ids, list | tuple | range):
        return memoryview(_pack("q", row_ids))
    ids = memoryview(row_ids)
    if not ids.c_contiguous or ids.format.lstrip("@=<") not in ("q", "l", "B") or ids.itemsize not in (1, 8):
        raise BadRequest(f"row ids must be contiguous int64, not {ids.format!r} of {ids.itemsize} bytes")
    flat = ids.cast("B") if ids.nbytes else memoryview(b"")
    if len(flat) % 8:
        raise BadRequest(f"row ids take 8 bytes each, {len(flat)} were given")
    return flat


def writable_bytes(out: Any, size: int) -> memoryview:
    """The caller's buffer as flat bytes.

    Raises BadRequest unless it is writable, contiguous and of `size` bytes.
    """
    view = memoryview(out)
    if view.readonly or not view.c_contiguous or view.nbytes != size:
        raise BadRequest(f"out must be a writable, contiguous buffer of {size} bytes, not of {view.nbytes}")
    return view.cast("B") if size else view
