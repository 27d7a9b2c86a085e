"""Finds the table inside a released checkpoint, in the safetensors shards as they are."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ple_daemon.errors import TableRefusedError
from ple_daemon.ple_config import PleConfig, read_config
from ple_daemon.safetensors_file import Tensor, read_header
from ple_daemon.strict_json import read_object
from ple_daemon.table_format import RowType, Segment, TableLayout, is_usable_scale, scale_value

_INDEX_NAME = "model.safetensors.index.json"
_SINGLE_NAME = "model.safetensors"
_EMBEDDING = re.compile(r"\.ple\.ple_embedding\.ngram_embedding\.(?:shard_(\d+)\.)?weight$")
_SCALE = re.compile(r"\.ple\.ple_embedding\.ngram_embedding\.weight_scale$")
_BUFFER = re.compile(
    r"\.ple\.ple_embedding\.(layer_multipliers|ngram_heads_vocab_sizes|ngram_heads_offsets)$"
)
_LAYER = re.compile(r"layers\.(\d+)\.ple\.")
_ROW_TYPES = {"BF16": RowType.BF16, "F8_E4M3": RowType.FP8_E4M3, "F32": RowType.F32}
_CONFIG_TYPES = {"bfloat16": RowType.BF16, "float32": RowType.F32}
_SCALE_BYTES = {"BF16": 2, "F32": 4}


def is_checkpoint(path: Path) -> bool:
    return (path / "config.json").is_file()


def read_checkpoint(folder: Path) -> TableLayout:
    """The layout of the one table in `folder`. Raises TableRefusedError, naming file and reason."""
    config = read_config(folder / "config.json")
    tensors = _ple_tensors(folder)
    shards = _ordered_shards(folder, config, [t for t in tensors if _EMBEDDING.search(t.name)])
    row_type = _row_type(config, shards)
    _check_shapes(config, shards)
    _check_buffers(config, tensors)
    return TableLayout(
        row_type=row_type,
        row_elements=config.row_elements,
        rows=config.rows,
        scale=_scale(folder, row_type, [t for t in tensors if _SCALE.search(t.name)]),
        constants=config.constants,
        segments=tuple(Segment(t.path, t.offset_bytes, t.shape[0]) for t in shards),
    )


def _ple_tensors(folder: Path) -> list[Tensor]:
    """Every tensor under `.ple.ple_embedding.` in the files that the index names."""
    weight_map = _weight_map(folder)
    headers = {name: read_header(folder / name) for name in sorted(set(weight_map.values()))}
    for tensor, name in weight_map.items():
        if _is_ple(tensor) and tensor not in headers[name]:
            raise TableRefusedError(f"{folder / name}: lacks {tensor}, which {_INDEX_NAME} puts there")
    found = [t for header in headers.values() for t in header.values() if _is_ple(t.name)]
    _refuse_twice(found)
    if not any(_EMBEDDING.search(t.name) for t in found):
        raise TableRefusedError(
            f"{folder}: no ngram_embedding tensor: this checkpoint came without its n-gram table"
        )
    return found


def _is_ple(name: str) -> bool:
    return ".ple.ple_embedding." in name


def _refuse_twice(tensors: list[Tensor]) -> None:
    seen: dict[str, Tensor] = {}
    for tensor in tensors:
        if tensor.name in seen:
            raise TableRefusedError(
                f"{tensor.path}: duplicate of {tensor.name}, also in {seen[tensor.name].path.name}"
            )
        seen[tensor.name] = tensor


def _weight_map(folder: Path) -> dict[str, str]:
    index = folder / _INDEX_NAME
    if index.is_file():
        weight_map = read_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise TableRefusedError(f"{index}: has no weight_map")
        _check_files(index, folder, weight_map.values())
        return weight_map
    single = folder / _SINGLE_NAME
    if not single.is_file():
        raise TableRefusedError(f"{folder}: not a checkpoint: neither {_INDEX_NAME} nor {_SINGLE_NAME}")
    return dict.fromkeys(read_header(single), _SINGLE_NAME)


def _check_files(index: Path, folder: Path, names: Iterable[Any]) -> None:
    for name in sorted({str(name) for name in names}):
        if Path(name).name != name:
            raise TableRefusedError(f"{index}: names {name!r}, which is no plain file name")
        if not (folder / name).is_file():
            raise TableRefusedError(f"{index}: names {name}, which does not exist in {folder}")


def _ordered_shards(folder: Path, config: PleConfig, tensors: list[Tensor]) -> list[Tensor]:
    layers = {int(m[1]) for t in tensors if (m := _LAYER.search(t.name))}
    if layers != {config.layer - 1}:
        raise TableRefusedError(
            f"{folder}: n-gram table at decoder layers {sorted(layers)}, config.json says {config.layer - 1}"
        )
    numbered: dict[int, Tensor] = {}
    for tensor in tensors:
        match = _EMBEDDING.search(tensor.name)
        number = -1 if match is None or match[1] is None else int(match[1])
        if number in numbered:
            raise TableRefusedError(
                f"{tensor.path}: duplicate shard {number}: {numbered[number].name}, {tensor.name}"
            )
        numbered[number] = tensor
    if -1 in numbered and len(numbered) > 1:
        raise TableRefusedError(f"{numbered[-1].path}: the table is there both whole and in shards")
    if -1 not in numbered:
        _check_numbers(folder, config, numbered)
    return [numbered[number] for number in sorted(numbered)]


def _check_numbers(folder: Path, config: PleConfig, numbered: dict[int, Tensor]) -> None:
    count = config.parts if config.parts is not None else max(numbered) + 1
    for number in range(count):
        if number not in numbered:
            raise TableRefusedError(f"{folder}: missing shard {number} of {count} of the n-gram table")
    if max(numbered) >= count:
        extra = numbered[max(numbered)]
        raise TableRefusedError(f"{extra.path}: {extra.name} is one too many: split_ngram_parts is {count}")


def _row_type(config: PleConfig, shards: list[Tensor]) -> RowType:
    first = shards[0]
    for tensor in shards:
        if tensor.dtype != first.dtype:
            raise TableRefusedError(
                f"{tensor.path}: {tensor.name} is {tensor.dtype}, {first.name} is {first.dtype}"
            )
    row_type = _ROW_TYPES.get(first.dtype)
    if row_type is None:
        raise TableRefusedError(
            f"{first.path}: {first.name} is {first.dtype}; supported are {', '.join(_ROW_TYPES)}"
        )
    if row_type is not RowType.FP8_E4M3 and config.dtype and _CONFIG_TYPES.get(config.dtype) is not row_type:
        raise TableRefusedError(
            f"{first.path}: {first.name} is {first.dtype}, config.json says {config.dtype}"
        )
    return row_type


def _check_shapes(config: PleConfig, shards: list[Tensor]) -> None:
    usual = -(-config.rows // len(shards))
    for number, tensor in enumerate(shards):
        if len(tensor.shape) != 2 or tensor.shape[1] != config.row_elements:
            raise TableRefusedError(
                f"{tensor.path}: {tensor.name} has shape {list(tensor.shape)}, config.json says rows of "
                f"{config.row_elements} elements"
            )
        expected = min(usual, config.rows - usual * number)
        if tensor.shape[0] != expected:
            kind = "short" if tensor.shape[0] < expected else "long"
            raise TableRefusedError(
                f"{tensor.path}: {kind} shard: {tensor.name} has {tensor.shape[0]} rows, "
                f"config.json asks for {expected}"
            )


def _check_buffers(config: PleConfig, tensors: list[Tensor]) -> None:
    constants = config.constants
    derived = {
        "layer_multipliers": constants.multipliers,
        "ngram_heads_vocab_sizes": constants.head_sizes,
        "ngram_heads_offsets": constants.head_offsets,
    }
    for tensor in tensors:
        match = _BUFFER.search(tensor.name)
        if match is None:
            continue
        stored = tensor.read()
        expected = b"".join(value.to_bytes(8, "little", signed=True) for value in derived[match[1]])
        if tensor.dtype != "I64" or stored != expected:
            raise TableRefusedError(
                f"{tensor.path}: hash constants {match[1]} differ from those that config.json gives"
            )


def _scale(folder: Path, row_type: RowType, scales: list[Tensor]) -> bytes:
    if row_type is not RowType.FP8_E4M3:
        if scales:
            raise TableRefusedError(f"{scales[0].path}: {scales[0].name} beside {row_type.value} rows")
        return b""
    if not scales:
        raise TableRefusedError(f"{folder}: fp8 table without its ngram_embedding.weight_scale")
    (tensor,) = scales
    if _SCALE_BYTES.get(tensor.dtype) != tensor.size_bytes:
        raise TableRefusedError(
            f"{tensor.path}: {tensor.name} must be one BF16 or F32, is {tensor.dtype}{list(tensor.shape)}"
        )
    stored = tensor.read()
    if not is_usable_scale(stored):
        raise TableRefusedError(f"{tensor.path}: {tensor.name} is {scale_value(stored)}, no usable scale")
    return stored
