"""What a synthetic checkpoint's config.json says, but for the quantization."""

from __future__ import annotations

from typing import Any

from ple_inference.synthetic.options import SyntheticOptions
from ple_inference.tiny import config as tiny

_REAL_TEXT: dict[str, Any] = {
    "hidden_size": 2560,
    "max_position_embeddings": 262_144,
    # sparse attention
    "num_attention_heads": 24,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "indexer_head_dim": 128,
    "indexer_budget": 2048,
    # gated delta-net
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    # experts
    "moe_intermediate_size": 640,
    "shared_expert_intermediate_size": 640,
    # hyper-connections
    "hc_lowrank": 320,
}
# As the tiny model, but with every row of a quantized weight a multiple of its group.
_SMALL_TEXT: dict[str, Any] = {
    "hidden_size": 128,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "hc_lowrank": 64,
}
_REAL_VISION: dict[str, Any] = {
    "depth": 27,
    "hidden_size": 1152,
    "num_heads": 16,
    "intermediate_size": 4304,
    "num_position_embeddings": 2304,
}


def model_config(options: SyntheticOptions) -> dict[str, Any]:
    """config.json: of the whole model with images, of the text model alone without."""
    text = _text_config(options)
    if not options.images:
        # Positions of text are plain numbers: vLLM would ask this model for those of images otherwise.
        rope = {key: value for key, value in text["rope_parameters"].items() if not key.startswith("mrope")}
        alone = {**text, "rope_parameters": rope}
        return {"architectures": ["Qwen4ExpForCausalLM"], "dtype": "bfloat16", **alone}
    whole = tiny.model_config(tiny.TinyOptions(vocab=options.vocab))
    vision = whole["vision_config"] | (_REAL_VISION if options.shapes == "real" else {})
    return {
        **whole,
        "text_config": {"dtype": "bfloat16", **text},
        "vision_config": vision | {"out_hidden_size": text["hidden_size"]},
    }


def _text_config(options: SyntheticOptions) -> dict[str, Any]:
    real = options.shapes == "real"
    rope = tiny.TEXT["rope_parameters"]
    return {
        **tiny.TEXT,
        **(_REAL_TEXT if real else _SMALL_TEXT),
        "model_type": "qwen4_exp_text",
        "vocab_size": options.ids.vocab_size,
        "bos_token_id": options.ids.endoftext,
        "eos_token_id": options.ids.endoftext,
        "num_hidden_layers": options.layers,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * (options.layers // 4),
        "rope_parameters": rope | ({"mrope_section": [11, 11, 10]} if real else {}),
        "num_experts": options.experts,
        "num_experts_per_tok": options.experts_per_token,
        "ngram_vocab_size_base": options.table_rows_base,
        "split_ngram_parts": options.table_shards,
    }
