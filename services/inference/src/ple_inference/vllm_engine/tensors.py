"""The tensors of a checkpoint by their safetensors headers; small ones can be read."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from ple_inference.checkpoint import CheckpointError, read_json

# The library safetensors reads no larger ones.
_MAX_HEADER_BYTES = 100_000_000
_SMALL_BYTES = 4096
_AGAIN = "download it again"
_ITEM_BYTES = {
    "BF16": 2,
    "F16": 2,
    "F32": 4,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F64": 8,
    "BOOL": 1,
    "I8": 1,
    "I16": 2,
    "U8": 1,
    "I32": 4,
    "I64": 8,
    "U16": 2,
    "U32": 4,
    "U64": 8,
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
        """Read the headers of every file that the index names. Raises CheckpointError.

        vLLM loads whatever lies in these files, in the index or not: both must name the same tensors.
        """
        index = folder / "model.safetensors.index.json"
        files = read_json(index).get("weight_map")
        if not isinstance(files, dict) or not files:
            raise CheckpointError(f"{index} names no tensors; {_AGAIN}")
        found, paths = cls(), {}
        for file in _file_names(index, files):
            paths[file] = folder / file
            for name, tensor in _header(paths[file]).items():
                if name in found:
                    raise CheckpointError(
                        f"{folder}: {name} is in {found[name].file.name} and in {file}; {_AGAIN}"
                    )
                found[name] = tensor
        for name, file in files.items():
            if name not in found or found[name].file is not paths[file]:
                raise CheckpointError(
                    f"{folder}/{file} lacks {name}, which the index says is there; {_AGAIN}"
                )
        stranger = next((name for name in found if name not in files), None)
        if stranger is not None:
            raise CheckpointError(
                f"{found[stranger].file} holds {stranger}, which the index does not name; {_AGAIN}"
            )
        return found

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


def _file_names(index: Path, files: Mapping[str, Any]) -> list[str]:
    """Of the files that an index names, sorted. Raises CheckpointError."""
    strange = [file for file in files.values() if not isinstance(file, str)]
    named = [] if strange else sorted(set(files.values()))
    # vLLM looks for no others.
    strange += [file for file in named if Path(file).name != file or not file.endswith(".safetensors")]
    if strange:
        raise CheckpointError(
            f"{index} names {strange[0]!r}, which is no .safetensors file of its folder; {_AGAIN}"
        )
    return named


def _header(path: Path) -> dict[str, Tensor]:
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path} is no file; {_AGAIN}")
    try:
        with path.open("rb") as file:
            size_bytes = int.from_bytes(file.read(8), "little")
            if not 0 < size_bytes <= _MAX_HEADER_BYTES:
                raise CheckpointError(
                    f"{path} is no safetensors file: a header of {size_bytes} bytes; {_AGAIN}"
                )
            header = json.loads(file.read(size_bytes), parse_constant=_no_number)
            file_bytes = file.seek(0, os.SEEK_END)
        found = {
            name: _tensor(path, entry, 8 + size_bytes)
            for name, entry in header.items()
            if name != "__metadata__"
        }
        if not all(isinstance(value, str) for value in (header.get("__metadata__") or {}).values()):
            raise ValueError("metadata that is no text")
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}; {_AGAIN}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is no safetensors file: its header cannot be read; {_AGAIN}"
        ) from error
    _check_extents(path, found, 8 + size_bytes, file_bytes)
    return found


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no JSON")


def _check_extents(path: Path, found: Mapping[str, Tensor], start_bytes: int, file_bytes: int) -> None:
    """Tensors follow upon each other to the end of the file, as safetensors wants it."""
    end_bytes = start_bytes
    for name, tensor in sorted(found.items(), key=lambda item: (item[1].offset_bytes, item[1].size_bytes)):
        if tensor.offset_bytes != end_bytes:
            raise CheckpointError(f"{path}: {name} does not begin where another tensor ends; {_AGAIN}")
        end_bytes += tensor.size_bytes
        if end_bytes > file_bytes:
            raise CheckpointError(f"{path} ends within {name}, was it copied to its end?")
    if file_bytes != end_bytes:
        raise CheckpointError(
            f"{path} has {file_bytes} bytes, its header describes {end_bytes}: it is another file, or was "
            "written over; download it again"
        )


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
