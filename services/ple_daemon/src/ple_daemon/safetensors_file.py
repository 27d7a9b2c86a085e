"""Reads the header of a safetensors file: names, types, shapes and where the bytes lie."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ple_daemon.errors import TableRefusedError
from ple_daemon.strict_json import parse_object

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
_ELEMENT_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor's place: `offset_bytes` counts from the start of the file."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    size_bytes: int

    def read(self) -> bytes:
        """The stored bytes; only for small tensors."""
        with self.path.open("rb") as file:
            file.seek(self.offset_bytes)
            return file.read(self.size_bytes)


def read_header(path: Path) -> dict[str, Tensor]:
    """Tensors of the file by name. Raises TableRefusedError when the header or the file's length is wrong."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if size < _LENGTH_BYTES or length > min(_MAX_HEADER_BYTES, size - _LENGTH_BYTES):
                raise _malformed(path, f"header length {length} does not fit in a file of {size} bytes")
            raw = file.read(length)
    except OSError as error:
        raise TableRefusedError(f"{path}: cannot be read: {error.strerror}") from error
    start = _LENGTH_BYTES + length
    tensors = {
        name: _tensor(path, start, name, entry)
        for name, entry in parse_object(path, raw).items()
        if name != "__metadata__"
    }
    _check_length(path, size, max((t.offset_bytes + t.size_bytes for t in tensors.values()), default=start))
    return tensors


def _tensor(path: Path, start: int, name: str, entry: Any) -> Tensor:
    try:
        dtype, shape = str(entry["dtype"]), tuple(entry["shape"])
        first, end = entry["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise _malformed(path, f"entry of {name} lacks dtype, shape or data_offsets") from error
    if not all(type(number) is int and number >= 0 for number in (*shape, first, end)) or end < first:
        raise _malformed(path, f"entry of {name} has shape or offsets that are no sizes")
    element = _ELEMENT_BYTES.get(dtype)
    if element is not None and end - first != math.prod(shape) * element:
        raise _malformed(path, f"{name} is {dtype}{list(shape)} but its offsets span {end - first} bytes")
    return Tensor(path, name, dtype, shape, start + first, end - first)


def _check_length(path: Path, size: int, expected: int) -> None:
    if size < expected:
        raise TableRefusedError(f"{path}: truncated: {size} bytes, its header says {expected}")
    if size > expected:
        raise TableRefusedError(f"{path}: too long: {size} bytes, its header says {expected}")


def _malformed(path: Path, reason: str) -> TableRefusedError:
    return TableRefusedError(f"{path}: malformed safetensors file: {reason}")
