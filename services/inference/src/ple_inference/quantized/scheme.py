"""Which weights of the INT4-mixed checkpoint are packed, and how. Data only: nothing here needs torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

PACKED, SCALE, SHAPE = ".weight_packed", ".weight_scale", ".weight_shape"
BLOCK_SCALE = ".weight_scale_inv"
BITS = (4, 6, 8)
WORD_BITS = 32
FP8_BLOCK = 128
"""Rows and columns that share a scale of an fp8 weight."""


def words(columns: int, bits: int) -> int:
    """int32 words of a packed row of `columns` values."""
    return -(-columns * bits // WORD_BITS)


@dataclass(frozen=True)
class Scheme:
    """Symmetric integers of `bits` bits; `group_size` neighbours of a row share a scale."""

    bits: int
    group_size: int

    def __post_init__(self) -> None:
        if self.bits not in BITS or self.group_size < 1:
            raise ValueError(f"no such scheme: {self.bits} bits, groups of {self.group_size}")

    def packed_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Of `weight_packed`, int32: a dense stream of bits."""
        return rows, words(columns, self.bits)

    def scale_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Of `weight_scale`. The last group of a row may be shorter."""
        return rows, -(-columns // self.group_size)


@dataclass(frozen=True)
class WeightClass:
    """Modules of one scheme: `modules` matches the end of a module's name, from a dot on."""

    name: str
    scheme: Scheme
    modules: str

    @property
    def target(self) -> str:
        """As compressed-tensors writes it: matched from the start of a module's name."""
        return rf"re:(.*\.)?{self.modules}$"


# in_proj_a and in_proj_b, 48 rows each, are read as no "in projections": 0.01 GB in all.
CLASSES = (
    WeightClass("A", Scheme(4, 128), r"layers\.\d+\.mlp\.experts\.\d+\.(gate|up|down)_proj"),
    WeightClass(
        "B",
        Scheme(6, 64),
        r"layers\.\d+\.(linear_attn\.(in_proj_qkv|in_proj_z|out_proj)|self_attn\.[qkvo]_proj"
        r"|mlp\.shared_expert\.(gate|up|down)_proj)",
    ),
    WeightClass("C", Scheme(8, 64), r"\w*hyper_connection\w*\.input_mix_weight_(down|up)"),
    WeightClass(
        "D",
        Scheme(8, 128),
        r"(lm_head|embed_tokens|layers\.\d+\.(ple\.(key|value)_proj|self_attn\.indexer\.index_qk_proj))",
    ),
)
# The draft module and the vision tower are not quantized.
_OTHER_MODELS = (r"re:^mtp\.", r"re:^model\.visual\.")
_PLAIN = ("mlp.gate", "mlp.shared_expert_gate")
_PLAIN_RECURRENT = ("linear_attn.in_proj_a", "linear_attn.in_proj_b")
_PLAIN_MIXERS = tuple(f"{kind}_hyper_connection.block_inject_weight" for kind in ("attn", "mlp"))


def scheme_of(name: str) -> Scheme | None:
    """The scheme of a module, or of its `.weight`, by its name in the checkpoint; None: it stays in BF16."""
    module = name.removesuffix(".weight")
    if any(re.match(pattern.removeprefix("re:"), module) for pattern in _OTHER_MODELS):
        return None
    for weights in CLASSES:
        if re.match(weights.target.removeprefix("re:"), module):
            return weights.scheme
    return None


def quantization_config(layers: int, prefix: str = "model.") -> dict[str, Any]:
    """What config.json says of the schemes. `prefix` is that of the decoder's modules in the checkpoint."""
    plain = [
        f"{prefix}layers.{layer}.{module}"
        for layer in range(layers)
        for module in _PLAIN + _PLAIN_MIXERS + (() if layer % 4 == 3 else _PLAIN_RECURRENT)
    ]
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "config_groups": {f"group_{number}": _group(weights) for number, weights in enumerate(CLASSES)},
        "ignore": [*plain, *_OTHER_MODELS],
    }


def _group(weights: WeightClass) -> dict[str, Any]:
    return {
        "targets": [weights.target],
        "format": "pack-quantized",
        "weights": {
            "num_bits": weights.scheme.bits,
            "type": "int",
            "symmetric": True,
            "strategy": "group",
            "group_size": weights.scheme.group_size,
            "dynamic": False,
            "actorder": None,
            "block_structure": None,
        },
        "input_activations": None,
        "output_activations": None,
    }
