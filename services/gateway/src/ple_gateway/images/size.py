"""How many pixels a finished picture has, read from the head of its data URL without decoding it."""

import binascii
import struct

import pybase64

_HEAD_CHARS = 64 * 1024  # of base64, a multiple of 4; metadata before the size rarely takes more
_PNG = b"\x89PNG\r\n\x1a\n"
_JPEG = b"\xff\xd8"
_JPEG_NO_SIZE = {0xC4, 0xC8, 0xCC}  # among C0 to CF: tables and extensions


def picture_px(url: str) -> int | None:
    """Return width times height of a PNG or JPEG; None when its head does not tell."""
    begin = url.find(",", 0, 200) + 1
    try:
        head = pybase64.b64decode(url[begin : begin + _HEAD_CHARS])
    except (binascii.Error, ValueError):
        return None
    if head.startswith(_PNG) and len(head) >= 24:
        width, height = struct.unpack(">II", head[16:24])
        return int(width * height)
    return _jpeg_px(head) if head.startswith(_JPEG) else None


def _jpeg_px(head: bytes) -> int | None:
    at = 2
    while at + 9 <= len(head) and head[at] == 0xFF:
        marker, length = head[at + 1], int.from_bytes(head[at + 2 : at + 4], "big")
        if 0xC0 <= marker <= 0xCF and marker not in _JPEG_NO_SIZE:
            height, width = struct.unpack(">HH", head[at + 5 : at + 9])
            return int(width * height)
        at += 2 + length
    return None
