"""The frames between the gateway and its image workers: two lengths, a media type, bytes."""

import struct

_HEADER = struct.Struct("<II")
HEADER_BYTES = _HEADER.size


def pack_frame(media_type: str, data: bytes) -> bytes:
    """Return one frame; requests and errors have an empty media type."""
    return _HEADER.pack(len(media_type), len(data)) + media_type.encode("ascii") + data


def unpack_header(header: bytes) -> tuple[int, int]:
    """Return the lengths (media type, data) from a frame's first 8 bytes."""
    media_type_bytes, data_bytes = _HEADER.unpack(header)
    return media_type_bytes, data_bytes
