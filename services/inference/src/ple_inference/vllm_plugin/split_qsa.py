"""vLLM's sparse attention with the indexer's projection apart from q, k and v, when stored otherwise."""

from __future__ import annotations

import copy
from typing import Any

from vllm.models.qwen4_exp.nvidia import model
from vllm.models.qwen4_exp.nvidia.qsa import Qwen4ExpQSAAttention

ATTENTION = ("q_proj", "k_proj", "v_proj")


def install() -> None:
    model.Qwen4ExpQSAAttention = SplitQSAAttention


def is_live() -> bool:
    return model.Qwen4ExpQSAAttention is SplitQSAAttention


class SplitQSAAttention(Qwen4ExpQSAAttention):
    """Upstream's one product of four projections, unless one scheme does not hold for all of them."""

    def __init__(self, *, vllm_config: Any, quant_config: Any, prefix: str, **options: Any) -> None:
        if _differ(quant_config, prefix):
            # Upstream keeps them apart for LoRA: it looks at nothing else. The copy shares all its parts.
            vllm_config = copy.copy(vllm_config)
            vllm_config.lora_config = True
            packed = quant_config.packed_modules_mapping
            quant_config.packed_modules_mapping = {**packed, "qkv_proj": list(ATTENTION)}
        super().__init__(vllm_config=vllm_config, quant_config=quant_config, prefix=prefix, **options)


def _differ(quant_config: Any, prefix: str) -> bool:
    if quant_config is None or quant_config.get_name() != "compressed-tensors":
        return False

    def scheme(name: str) -> Any:
        found = quant_config.get_scheme_dict(_Linear(), f"{prefix}.{name}")
        return None if found is None else found["weights"]

    return bool(scheme(ATTENTION[0]) != scheme("indexer.index_qk_proj"))


class _Linear:
    """A config may speak of the class `Linear`, and neither projection is made yet."""
