"""vLLM's hyper-connection residual with quantized projections beside a BF16 injection.

Upstream multiplies the low-rank down projection and the injection in one BF16 product. Here they are apart,
since one is INT8 and the other is not; the glue kernels and the calls of the decoder layer stay upstream's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.models.utils import AutoWeightsLoader, maybe_prefix
from vllm.models.qwen4_exp.nvidia import model
from vllm.models.qwen4_exp.nvidia.hyperconnection import GatedResidual, HyperConnectionConfig
from vllm.models.qwen4_exp.nvidia.ops.hc import hc_silu

MERGED = "input_mix_weight_down_block_inject."
DOWN, UP, INJECT = "input_mix_weight_down", "input_mix_weight_up", "block_inject_weight"
# cuBLAS has fast kernels for 16 rows and none for the 4 of an injection.
INJECT_ROWS = 16


def install() -> None:
    model.GatedResidual = QuantizedGatedResidual


def is_live() -> bool:
    return model.GatedResidual is QuantizedGatedResidual


class QuantizedGatedResidual(GatedResidual):
    """Upstream's, unless the checkpoint stores the down or up projection packed."""

    def __init__(self, config: HyperConnectionConfig, use_combine: bool = True, prefix: str = "") -> None:
        super().__init__(config, use_combine, prefix)
        quant_config = get_current_vllm_config().quant_config
        self.is_apart = self._is_packed(quant_config, prefix)
        if not self.is_apart:
            return
        wide, narrow = self.hyper_hidden_size, self.hc_lowrank
        setattr(self, DOWN, _projection(wide, narrow, config.params_dtype, quant_config, prefix, DOWN))
        setattr(self, UP, _projection(narrow, wide, config.params_dtype, quant_config, prefix, UP))
        if use_combine:
            del self.input_mix_weight_down_block_inject
            rows = max(INJECT_ROWS, self.hc_count)
            setattr(self, INJECT, _projection(wide, rows, config.params_dtype, None, prefix, INJECT))
            self.load_weights = self._load_apart

    def _is_packed(self, quant_config: Any, prefix: str) -> bool:
        if quant_config is None or quant_config.get_name() != "compressed-tensors":
            return False
        linear = self.input_mix_weight_up  # any linear layer: a config may speak of the class
        names = (maybe_prefix(prefix, name) for name in (DOWN, UP))
        return any(quant_config.get_scheme_dict(linear, name) is not None for name in names)

    def _down_and_inject(self, xn: Tensor) -> tuple[Tensor, Tensor | None]:
        """bf16 [T, HC * H] -> low rank [T, R] after SiLU, and logits of the injection [T, HC]."""
        if not (self.is_apart and self.use_combine):
            return super()._down_and_inject(xn)
        injection = self.block_inject_weight(xn)[:, : self.hc_count]
        return hc_silu(self.input_mix_weight_down(xn), self.hc_count), injection

    def _load_apart(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """The model's mapper has named both as shards of the merged product: undo that."""
        return AutoWeightsLoader(self).load_weights(self._unmerged(name, weight) for name, weight in weights)

    def _unmerged(self, name: str, weight: Tensor) -> tuple[str, Tensor]:
        if not name.startswith(MERGED):
            return name, weight
        kind = name.removeprefix(MERGED)
        if weight.shard_id == 0:  # type: ignore[attr-defined]
            return f"{DOWN}.{kind}", weight.detach()
        missing = self.block_inject_weight.output_size - self.hc_count
        return f"{INJECT}.{kind}", functional.pad(weight.detach(), (0, 0, 0, missing))


def _projection(
    columns: int, rows: int, dtype: torch.dtype, quant_config: Any, prefix: str, name: str
) -> ReplicatedLinear:
    return ReplicatedLinear(
        columns,
        rows,
        bias=False,
        params_dtype=dtype,
        quant_config=quant_config,
        prefix=maybe_prefix(prefix, name),
        return_bias=False,
    )
