"""The tensors of a checkpoint by their safetensors headers; small ones can be read."""

from __future__ import annotations

import json
import os
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from ple_inference.checkpoint import CheckpointError, read_json

_MAX_HEADER_BYTES = 256 * 2**20
_SMALL_BYTES = 4096
_ITEM_BYTES = {
    "BF16": 2,
    "F16": 2,
    "F32": 4,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I8": 1,
    "U8": 1,
    "I32": 4,
    "I64": 8,
}


@dataclass(frozen=True)
class Tensor:
    """Where one tensor lies. `dtype` as safetensors writes it: BF16, F8_E4M3, I64, U8, ..."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    size_bytes: int


class Tensors(dict[str, Tensor]):
    """All tensors of a checkpoint's index, by name."""

    @classmethod
    def of(cls, folder: Path) -> Tensors:
        """Read the headers of every file that the index names. Raises CheckpointError."""
        index = read_json(folder / "model.safetensors.index.json")
        files = index.get("weight_map")
        if not isinstance(files, dict) or not files:
            raise CheckpointError(f"{folder}/model.safetensors.index.json names no tensors")
        headers = {file: _header(folder / file) for file in sorted({str(file) for file in files.values()})}
        missing = next((name for name, file in files.items() if name not in headers[str(file)]), None)
        if missing is not None:
            raise CheckpointError(f"{folder}/{files[missing]} lacks {missing}, which the index says is there")
        return cls((name, headers[str(file)][name]) for name, file in files.items())

    def read(self, name: str) -> bytes:
        """The bytes of a small tensor. Raises KeyError, CheckpointError."""
        tensor = self[name]
        if tensor.size_bytes > _SMALL_BYTES:
            raise CheckpointError(f"{tensor.file}: {name} has {tensor.size_bytes} bytes, more than it should")
        try:
            with tensor.file.open("rb") as file:
                file.seek(tensor.offset_bytes)
                content = file.read(tensor.size_bytes)
        except OSError as error:
            raise CheckpointError(f"cannot read {tensor.file}: {error.strerror}") from error
        if len(content) != tensor.size_bytes:
            raise CheckpointError(f"{tensor.file} ends within {name}")
        return content

    def int64(self, name: str) -> tuple[int, ...]:
        """The values of a small I64 tensor. Raises KeyError, CheckpointError."""
        tensor = self[name]
        if tensor.dtype != "I64":
            raise CheckpointError(f"{tensor.file}: {name} is {tensor.dtype}, not I64")
        if tensor.size_bytes != 8 * prod(tensor.shape):
            raise CheckpointError(
                f"{tensor.file}: {name} has {tensor.size_bytes} bytes, not those of its shape"
            )
        return struct.unpack(f"<{prod(tensor.shape)}q", self.read(name))


def _header(path: Path) -> dict[str, Tensor]:
    try:
        with path.open("rb") as file:
            size_bytes = int.from_bytes(file.read(8), "little")
            if not 0 < size_bytes <= _MAX_HEADER_BYTES:
                raise CheckpointError(f"{path} is no safetensors file: a header of {size_bytes} bytes")
            header = json.loads(file.read(size_bytes))
            file_bytes = file.seek(0, os.SEEK_END)
        found = {
            name: _tensor(path, entry, 8 + size_bytes)
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is no safetensors file: its header cannot be read") from error
    end_bytes = 8 + size_bytes
    for name, tensor in found.items():
        if tensor.offset_bytes + tensor.size_bytes > file_bytes:
            raise CheckpointError(f"{path} ends within {name}, was it copied to its end?")
        end_bytes = max(end_bytes, tensor.offset_bytes + tensor.size_bytes)
    if file_bytes != end_bytes:
        raise CheckpointError(
            f"{path} has {file_bytes} bytes, its header describes {end_bytes}: it is another file, or was "
            "written over; download it again"
        )
    return found


def _tensor(path: Path, entry: dict[str, Any], data_bytes: int) -> Tensor:
    """Raises ValueError, KeyError, TypeError."""
    start, end = entry["data_offsets"]
    sizes = (start, end - start, *entry["shape"])
    if any(type(size) is not int or size < 0 for size in sizes):
        raise ValueError("sizes that are none")
    dtype, shape = str(entry["dtype"]), tuple(entry["shape"])
    if dtype in _ITEM_BYTES and prod(shape) * _ITEM_BYTES[dtype] != end - start:
        raise ValueError("bytes that are not those of the shape")
    return Tensor(path, dtype, shape, data_bytes + start, end - start)
