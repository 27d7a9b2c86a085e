"""The frames between the gateway and its worker processes: two lengths, a kind, bytes."""

import struct
from typing import BinaryIO

_HEADER = struct.Struct("<II")
HEADER_BYTES = _HEADER.size


def pack_frame(kind: str, data: bytes) -> bytes:
    """Return one frame; `kind` is a word that both ends know."""
    return _HEADER.pack(len(kind), len(data)) + kind.encode("ascii") + data


def unpack_header(header: bytes) -> tuple[int, int]:
    """Return the lengths (kind, data) from a frame's first 8 bytes."""
    kind_bytes, data_bytes = _HEADER.unpack(header)
    return kind_bytes, data_bytes


def read_frame(source: BinaryIO) -> tuple[str, bytes] | None:
    """Read one frame (kind, data); None at the end, also in the middle of a frame."""
    header = source.read(HEADER_BYTES)
    if len(header) < HEADER_BYTES:
        return None
    kind_bytes, data_bytes = unpack_header(header)
    payload = source.read(kind_bytes + data_bytes)
    if len(payload) < kind_bytes + data_bytes:
        return None
    return payload[:kind_bytes].decode("ascii"), payload[kind_bytes:]


def write_frame(target: BinaryIO, kind: str, data: bytes) -> None:
    """Write one frame at once."""
    target.write(pack_frame(kind, data))
    target.flush()
