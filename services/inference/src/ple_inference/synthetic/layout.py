"""The tensors of a synthetic checkpoint: names, types, shapes, how each is drawn, and in which file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from ple_inference.quantized.scheme import FP8_BLOCK, PACKED, SCALE, SHAPE, quantization_config, scheme_of
from ple_inference.synthetic.config import model_config
from ple_inference.synthetic.draw import (
    Constant,
    Draw,
    Fp8,
    Integers,
    Nibbles,
    Normal,
    TableRows,
    Uniform,
    scales,
)
from ple_inference.synthetic.options import SyntheticOptions
from ple_inference.tiny.weights import hash_buffers, parameter_shapes

_FUSED = re.compile(r"(.*\.mlp\.experts)\.(gate_up|down)_proj$")
_FILE_OF_LAYER = re.compile(r"(mtp|.*\.layers\.\d+)\.")
TABLE_FILES = 8
# The released model's activations stay of order one with these; larger ones diverge within eight layers.
_PROJECTION_GAIN = 1.2
_TABLE_STD = 1.0


@dataclass(frozen=True)
class Spec:
    """One tensor before it is drawn."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    draw: Draw

    @property
    def rows(self) -> int:
        return self.shape[0]

    @property
    def columns(self) -> int:
        return prod(self.shape[1:])

    @property
    def row_bytes(self) -> int:
        return self.columns * self.dtype.itemsize

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def files(options: SyntheticOptions) -> list[list[Spec]]:
    """Every tensor, by the file that it goes into. Allocates nothing."""
    shapes = parameter_shapes(model_config(options), draft=options.images)
    table = f"{options.decoder}layers.1.ple.ple_embedding.ngram_embedding"
    rows, elements = shapes.pop(f"{table}.weight")
    grouped: dict[str, list[Spec]] = {}
    for name, shape in shapes.items():
        layer = _FILE_OF_LAYER.match(name)
        grouped.setdefault(layer[1] if layer else "", []).extend(_stored(name, shape, options))
    ple = grouped[f"{options.decoder}layers.1"]
    ple += _hash_buffers(options)
    if options.quant == "fp8":
        scale = torch.tensor([_TABLE_STD / Fp8().std], dtype=torch.bfloat16)
        ple.append(Spec(f"{table}.weight_scale", scale.dtype, (1,), Constant(scale)))
    return [*grouped.values(), *_table_files(table, rows, elements, options)]


def _stored(name: str, shape: tuple[int, ...], options: SyntheticOptions) -> Iterator[Spec]:
    """The tensors that a parameter of Transformers' model is stored as."""
    fused = _FUSED.match(name)
    draft = name.startswith("mtp.")
    if fused and options.quant == "fp8":
        for part, rows, columns in _experts(fused, shape):
            yield from _fp8(part, rows, columns)
    elif fused and options.quant == "int4-mixed" and not draft:
        for part, rows, columns in _experts(fused, shape):
            yield from _packed(part, rows, columns, options)
    elif options.quant == "int4-mixed" and len(shape) == 2 and scheme_of(name):
        yield from _packed(name.removesuffix(".weight"), *shape, options)
    else:
        yield Spec(name, torch.bfloat16, shape, _plain(name, shape))


def _experts(fused: re.Match[str], shape: tuple[int, ...]) -> Iterator[tuple[str, int, int]]:
    """(module, rows, columns) of each expert's projections."""
    count, rows, columns = shape
    parts = ("gate", "up") if fused[2] == "gate_up" else ("down",)
    for expert in range(count):
        for part in parts:
            yield f"{fused[1]}.{expert}.{part}_proj", rows // len(parts), columns


def _packed(module: str, rows: int, columns: int, options: SyntheticOptions) -> Iterator[Spec]:
    scheme = scheme_of(module)
    assert scheme is not None, module
    if columns % scheme.group_size:
        raise ValueError(f"{module} has rows of {columns}, no multiple of its group of {scheme.group_size}")
    words: Nibbles | Integers = Nibbles() if scheme.bits == 4 else Integers(scheme, columns)
    yield Spec(module + PACKED, torch.int32, scheme.packed_shape(rows, columns), words)
    dtype = torch.float16 if options.scale_dtype == "fp16" else torch.bfloat16
    scale = scales(_std(f"{module}.weight", (rows, columns)) / words.std, dtype)
    yield Spec(module + SCALE, dtype, scheme.scale_shape(rows, columns), scale)
    yield Spec(module + SHAPE, torch.int64, (2,), Constant(torch.tensor([rows, columns])))


def _fp8(module: str, rows: int, columns: int) -> Iterator[Spec]:
    yield Spec(f"{module}.weight", torch.float8_e4m3fn, (rows, columns), Fp8())
    scale = scales(_std(f"{module}.weight", (rows, columns)) / Fp8().std, torch.bfloat16)
    blocks = (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
    yield Spec(f"{module}.weight_scale_inv", torch.bfloat16, blocks, scale)


def _plain(name: str, shape: tuple[int, ...]) -> Draw:
    if name.endswith(("A_log", "dt_bias")):
        return Uniform(-1, 1)  # what makes the linear layers forget at all
    # These two kinds of norm multiply by the weight, the others by one more.
    gain = "linear_attn.norm" in name or ("visual" in name and "norm" in name and name.endswith(".weight"))
    return Normal(_std(name, shape), mean=1.0 if gain else 0.0)


def _std(name: str, shape: tuple[int, ...]) -> float:
    if "norm" in name:
        return 0.1
    if "conv1d" in name:
        return 0.3
    if "patch_embed" in name:
        return 0.03
    if "embed" in name and not name.startswith("mtp."):
        return 1.0
    return float(_PROJECTION_GAIN / shape[-1] ** 0.5)


def _hash_buffers(options: SyntheticOptions) -> Iterator[Spec]:
    buffers = hash_buffers(model_config(options), f"{options.decoder}layers.1.ple.ple_embedding.")
    for name, values in buffers:
        yield Spec(name, values.dtype, tuple(values.shape), Constant(values))


def _table_files(table: str, rows: int, elements: int, options: SyntheticOptions) -> Iterator[list[Spec]]:
    """The shards of the table in row order, some in each file."""
    shards = options.table_shards
    per_shard = -(-rows // shards)
    values: Draw = Fp8() if options.quant == "fp8" else Normal(_TABLE_STD)
    dtype = torch.float8_e4m3fn if options.quant == "fp8" else torch.bfloat16
    for file in range(TABLE_FILES):
        found = []
        for shard in range(file * shards // TABLE_FILES, (file + 1) * shards // TABLE_FILES):
            first, last = shard * per_shard, min((shard + 1) * per_shard, rows)
            name = f"{table}.shard_{shard}.weight"
            found.append(Spec(name, dtype, (last - first, elements), TableRows(values, first)))
        yield found


def quantization_of(options: SyntheticOptions, specs: list[Spec]) -> dict[str, Any]:
    """What config.json gets beside the model's shapes: nothing for BF16."""
    if options.quant == "int4-mixed":
        return {"quantization_config": quantization_config(options.layers, options.decoder)}
    if options.quant == "fp8":
        return {"quantization_config": _fp8_config(specs)}
    return {}


def _fp8_config(specs: list[Spec]) -> dict[str, Any]:
    plain = [
        spec.name.removesuffix(".weight")
        for spec in specs
        if spec.dtype == torch.bfloat16 and len(spec.shape) == 2 and spec.name.endswith(".weight")
    ]
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
        "modules_to_convert": ["ple.ple_embedding.ngram_embedding"],
        "modules_to_not_convert": plain,
    }
