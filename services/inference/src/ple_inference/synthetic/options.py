"""What decides a synthetic checkpoint's content."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ple_inference.tiny.config import REAL, TINY, SpecialIds

Quant = Literal["none", "int4-mixed", "fp8"]
Shapes = Literal["tiny", "real"]
MAX_TABLE_ROWS_BASE = 20_000_000


@dataclass(frozen=True)
class SyntheticOptions:
    """Equal options give equal bytes. Raises ValueError.

    `images`: as released, with vision tower, draft module and tokenizer; without, the decoder alone, under
    the architecture Qwen4ExpForCausalLM. `scale_dtype` is that of INT4-mixed's `weight_scale`.
    """

    quant: Quant = "none"
    shapes: Shapes = "real"
    layers: int = 8
    experts: int = 512
    table_rows_base: int = 200_000
    vocab: Literal["real", "tiny"] = "real"
    images: bool = False
    scale_dtype: Literal["fp16", "bf16"] = "fp16"
    seed: int = 0

    def __post_init__(self) -> None:
        if not 4 <= self.layers <= 96 or self.layers % 4:
            raise ValueError(f"--layers is {self.layers}; it must be a multiple of 4, at most 96")
        if not self.experts_per_token <= self.experts <= 4096:
            least = self.experts_per_token
            raise ValueError(f"--experts is {self.experts}; it must lie in [{least}, 4096]")
        if not 0 <= self.seed < 2**31:
            raise ValueError(f"--seed is {self.seed}; it must lie in [0, 2^31)")
        if not 16 <= self.table_rows_base <= MAX_TABLE_ROWS_BASE:
            raise ValueError(
                f"--table-rows-base is {self.table_rows_base}; it must lie in [16, {MAX_TABLE_ROWS_BASE}]"
            )
        if self.shapes == "real" and self.vocab != "real":
            raise ValueError("--vocab tiny goes with --shapes tiny")

    @property
    def experts_per_token(self) -> int:
        return 10 if self.shapes == "real" else 4

    @property
    def table_shards(self) -> int:
        return 128 if self.shapes == "real" else 8

    @property
    def ids(self) -> SpecialIds:
        return REAL if self.vocab == "real" else TINY

    @property
    def decoder(self) -> str:
        """What the names of the decoder's tensors begin with."""
        return "model.language_model." if self.images else "model."
