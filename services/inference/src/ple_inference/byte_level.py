"""The alphabet in which byte-level tokenizers write bytes: one printable character each."""

from __future__ import annotations


def _alphabet() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    direct = {chr(byte): byte for byte in printable}
    return direct | {chr(256 + place): byte for place, byte in enumerate(others)}


BYTE_OF_CHARACTER = _alphabet()
CHARACTER_OF_BYTE = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}
