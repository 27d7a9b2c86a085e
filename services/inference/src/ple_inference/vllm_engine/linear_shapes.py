"""Rows and columns of every matrix of the decoder, by the config: what a packed tensor must unpack to."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

RECURRENT = "linear_attention"
ATTENTION = ("full_attention", "qwen_sparse_attention", "indexed_attention")
"""Kinds of layers, as `layer_types` names them."""
_LAYER = re.compile(r"layers\.\d+\.")
_EXPERT = re.compile(r"mlp\.experts\.\d+\.")
_MIXER = re.compile(r".*hyper_connection(_mixer)?\.")


class LinearShapes:
    """Shapes [rows, columns] by a module's name without the decoder's prefix: layers.3.self_attn.q_proj."""

    def __init__(self, text: Mapping[str, Any]) -> None:
        """`text`: the config of the text model, checked by `check_config`."""
        size = {name: number for name, number in text.items() if type(number) is int}
        hidden, streams = size["hidden_size"], size["hidden_size"] * size["hc_count"]
        keys = size["linear_num_key_heads"] * size["linear_key_head_dim"]
        values = size["linear_num_value_heads"] * size["linear_value_head_dim"]
        queries = size["num_attention_heads"] * size["head_dim"]
        attended = size["num_key_value_heads"] * size["head_dim"]
        heads = size["indexer_n_heads"] + size["indexer_kv_heads"]
        width, shared = size["moe_intermediate_size"], size["shared_expert_intermediate_size"]
        embedded = int(text.get("ple_embed_dim") or hidden)
        self.experts = size["num_experts"]
        self._shapes = {
            "embed_tokens": (size["vocab_size"], hidden),
            "lm_head": (size["vocab_size"], hidden),
            "linear_attn.in_proj_qkv": (2 * keys + values, hidden),
            "linear_attn.in_proj_z": (values, hidden),
            "linear_attn.in_proj_b": (size["linear_num_value_heads"], hidden),
            "linear_attn.in_proj_a": (size["linear_num_value_heads"], hidden),
            "linear_attn.out_proj": (hidden, values),
            "self_attn.q_proj": (2 * queries, hidden),
            "self_attn.k_proj": (attended, hidden),
            "self_attn.v_proj": (attended, hidden),
            "self_attn.o_proj": (hidden, queries),
            "self_attn.indexer.index_qk_proj": (heads * size["indexer_head_dim"], hidden),
            "mlp.gate": (self.experts, hidden),
            "mlp.shared_expert_gate": (1, hidden),
            "mlp.shared_expert.gate_proj": (shared, hidden),
            "mlp.shared_expert.up_proj": (shared, hidden),
            "mlp.shared_expert.down_proj": (hidden, shared),
            "expert.gate_proj": (width, hidden),
            "expert.up_proj": (width, hidden),
            "expert.down_proj": (hidden, width),
            "ple.key_proj": (streams, embedded),
            "ple.value_proj": (hidden, embedded),
            "mixer.input_mix_weight_down": (size["hc_lowrank"], streams),
            "mixer.input_mix_weight_up": (streams, size["hc_lowrank"]),
            "mixer.block_inject_weight": (size["hc_count"], streams),
        }

    def of(self, module: str) -> tuple[int, int] | None:
        """[rows, columns]; None for what is no matrix of the decoder."""
        inner = _LAYER.sub("", module, count=1)
        inner = _MIXER.sub("mixer.", _EXPERT.sub("expert.", inner))
        return self._shapes.get(inner)

    def modules_of(self, layer: int, *, attention: bool, ple: bool) -> list[str]:
        """Matrices of one decoder layer that every checkpoint has under these names; no routed experts."""
        starts = ("self_attn." if attention else "linear_attn.", "mlp.", *(("ple.",) if ple else ()))
        inner = [name for name in self._shapes if name.startswith(starts)]
        mixers = [name.partition(".")[2] for name in self._shapes if name.startswith("mixer.")]
        inner += [f"{kind}_hyper_connection.{name}" for kind in ("attn", "mlp") for name in mixers]
        return [f"layers.{layer}.{name}" for name in inner]
