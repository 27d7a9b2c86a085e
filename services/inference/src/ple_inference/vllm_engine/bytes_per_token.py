"""What one decoded token reads of GPU memory, and how fast that lets tokens come."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ple_inference.vllm_engine.linear_shapes import RECURRENT
from ple_inference.vllm_engine.rank_modules import Module

_STATE_BYTES = 4
"""Of an element of a recurrent state: float32."""


@dataclass(frozen=True)
class BytesPerToken:
    """For one stream. Weights once each, as the kernels read them; activations are not counted."""

    weights: Mapping[str, int]
    """By kind: ten of 512 experts, one row of the embedding, everything else whole; no vision."""
    states: int
    """Of the recurrent layers (GDN, PLE), read and written."""
    selected_kv: int
    """K/V of the tokens that the attention layers (QSA) select, at most `indexer_budget`."""
    pooled_keys: int
    """Pooled keys of a context of the full length, of which the indexer reads all."""

    @property
    def weights_bytes(self) -> int:
        return sum(self.weights.values())

    def tokens_per_s(self, memory_bytes_per_s: float) -> float:
        """At most, of a short context, one stream: stages read one after the other."""
        return memory_bytes_per_s / (self.weights_bytes + self.states)


def bytes_per_token(
    ranks: Sequence[Sequence[Module]], text: Mapping[str, Any], *, kv_bytes: int, context: int
) -> BytesPerToken:
    """`kv_bytes`: of one element of the K/V cache. `context`: tokens of a full one."""
    weights = Counter[str]()
    for module in (module for modules in ranks for module in modules):
        if module.part != "vision":
            weights[module.part] += _read(module, text)
    recurrent = sum(kind == RECURRENT for kind in text["layer_types"])
    attention = len(text["layer_types"]) - recurrent
    selected = min(context, text["indexer_budget"])
    pooled = context // text["indexer_compress_ratio"]
    return BytesPerToken(
        weights,
        states=2 * (recurrent * _state_bytes(text) + _ple_state_bytes(text)),
        selected_kv=attention * selected * text["num_key_value_heads"] * text["head_dim"] * 2 * kv_bytes,
        pooled_keys=attention * pooled * text["indexer_head_dim"] * 2,
    )


def _read(module: Module, text: Mapping[str, Any]) -> int:
    if module.name == "embed_tokens":
        return module.kept_bytes // int(text["vocab_size"])
    if module.part == "routed experts":
        return module.kept_bytes * int(text["num_experts_per_tok"]) // int(text["num_experts"])
    return module.kept_bytes


def _state_bytes(text: Mapping[str, Any]) -> int:
    """Of one GDN layer: the recurrent state, and the inputs that its convolution keeps, in bf16."""
    keys = text["linear_num_key_heads"] * text["linear_key_head_dim"]
    values = text["linear_num_value_heads"] * text["linear_value_head_dim"]
    kept = (2 * keys + values) * (text["linear_conv_kernel_dim"] - 1) * 2
    return int(values * text["linear_key_head_dim"] * _STATE_BYTES + kept)


def _ple_state_bytes(text: Mapping[str, Any]) -> int:
    channels = text["hidden_size"] * text["hc_count"]
    return int(channels * (text["ple_conv_kernel_size"] - 1) * text["ngram_size"] * 2)
