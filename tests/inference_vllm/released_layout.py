"""Names and shapes of the released checkpoints' tensors, of which the published byte totals are the check."""

from __future__ import annotations

from typing import Any

Shapes = dict[str, tuple[str, list[int]]]
BF16_BYTES = 359_999_963_128
FP8_BYTES = 185_502_232_570
HIDDEN, STREAMS, EXPERTS, EXPERT_WIDTH = 2560, 10_240, 512, 640
PREFIX = "model.language_model."

TEXT: dict[str, Any] = {
    "model_type": "qwen4_exp_text",
    "vocab_size": 248_320,
    "eos_token_id": 248_044,
    "num_hidden_layers": 48,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 12,
    "max_position_embeddings": 262_144,
    "hidden_size": HIDDEN,
    "head_dim": 256,
    "num_key_value_heads": 2,
    "indexer_head_dim": 128,
    "indexer_compress_ratio": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "mamba_ssm_dtype": "float32",
    "hc_count": 4,
    "ple_layer_ids": [2],
    "ple_embed_dim": 2560,
    "ple_conv_kernel_size": 4,
    "ngram_size": 3,
    "heads_per_ngram": 8,
}


def config(*, fp8: bool) -> dict[str, Any]:
    quantization = {"quantization_config": {"quant_method": "fp8"}} if fp8 else {}
    return {"model_type": "qwen4_exp", "text_config": TEXT, "vision_config": {}, **quantization}


def tensors(*, fp8: bool) -> Shapes:
    found: Shapes = {}
    for layer, kind in enumerate(TEXT["layer_types"]):
        name = f"{PREFIX}layers.{layer}."
        attention = _qsa() if kind == "full_attention" else _gdn()
        found |= {name + part: shape for part, shape in (attention | _moe(fp8) | _mixers()).items()}
    found |= _ple(fp8)
    found[f"{PREFIX}embed_tokens.weight"] = found["lm_head.weight"] = _bf16(248_320, HIDDEN)
    found |= {f"{PREFIX}hyper_connection_mixer.{part}": shape for part, shape in _mixer().items()}
    found |= {f"mtp.layers.0.{part}": shape for part, shape in (_qsa() | _moe(fp8) | _mixers()).items()}
    found |= {f"mtp.hyper_connection_mixer.{part}": shape for part, shape in _mixer().items()}
    found |= {
        "mtp.pre_fc_norm_embedding.weight": _bf16(HIDDEN),
        "mtp.pre_fc_norm_hidden.weight": _bf16(STREAMS),
        "mtp.fc_embedding.weight": _bf16(HIDDEN, HIDDEN),
        "mtp.fc_hidden.weight": _bf16(HIDDEN, HIDDEN),
    }
    return found | _vision()


def _bf16(*shape: int) -> tuple[str, list[int]]:
    return "BF16", list(shape)


def _qsa() -> Shapes:
    return {
        "self_attn.q_proj.weight": _bf16(12_288, HIDDEN),
        "self_attn.k_proj.weight": _bf16(512, HIDDEN),
        "self_attn.v_proj.weight": _bf16(512, HIDDEN),
        "self_attn.o_proj.weight": _bf16(HIDDEN, 6144),
        "self_attn.q_norm.weight": _bf16(256),
        "self_attn.k_norm.weight": _bf16(256),
        "self_attn.indexer.index_qk_proj.weight": _bf16(640, HIDDEN),
        "self_attn.indexer.q_layernorm.weight": _bf16(128),
        "self_attn.indexer.k_layernorm.weight": _bf16(128),
    }


def _gdn() -> Shapes:
    return {
        "linear_attn.in_proj_qkv.weight": _bf16(STREAMS, HIDDEN),
        "linear_attn.in_proj_z.weight": _bf16(6144, HIDDEN),
        "linear_attn.in_proj_b.weight": _bf16(48, HIDDEN),
        "linear_attn.in_proj_a.weight": _bf16(48, HIDDEN),
        "linear_attn.conv1d.weight": _bf16(STREAMS, 1, 4),
        "linear_attn.out_proj.weight": _bf16(HIDDEN, 6144),
        "linear_attn.norm.weight": _bf16(128),
        "linear_attn.dt_bias": _bf16(48),
        "linear_attn.A_log": _bf16(48),
    }


def _moe(fp8: bool) -> Shapes:
    common = {
        "mlp.gate.weight": _bf16(EXPERTS, HIDDEN),
        "mlp.shared_expert.gate_proj.weight": _bf16(EXPERT_WIDTH, HIDDEN),
        "mlp.shared_expert.up_proj.weight": _bf16(EXPERT_WIDTH, HIDDEN),
        "mlp.shared_expert.down_proj.weight": _bf16(HIDDEN, EXPERT_WIDTH),
        "mlp.shared_expert_gate.weight": _bf16(1, HIDDEN),
    }
    if not fp8:
        return common | {
            "mlp.experts.gate_up_proj": _bf16(EXPERTS, 2 * EXPERT_WIDTH, HIDDEN),
            "mlp.experts.down_proj": _bf16(EXPERTS, HIDDEN, EXPERT_WIDTH),
        }
    for expert in range(EXPERTS):
        for part, shape in (("gate", (640, 2560)), ("up", (640, 2560)), ("down", (2560, 640))):
            name = f"mlp.experts.{expert}.{part}_proj.weight"
            common[name] = ("F8_E4M3", list(shape))
            common[f"{name}_scale_inv"] = _bf16(*(side // 128 for side in shape))
    return common


def _mixer() -> Shapes:
    return {
        "hc_norm.weight": _bf16(STREAMS),
        "input_mix_weight_down.weight": _bf16(320, STREAMS),
        "input_mix_weight_up.weight": _bf16(STREAMS, 320),
    }


def _mixers() -> Shapes:
    mixer = _mixer() | {"block_inject_weight.weight": _bf16(4, STREAMS)}
    return {
        f"{kind}_hyper_connection.{part}": shape for kind in ("attn", "mlp") for part, shape in mixer.items()
    }


def _ple(fp8: bool) -> Shapes:
    name = f"{PREFIX}layers.1.ple."
    row_type = "F8_E4M3" if fp8 else "BF16"
    table = f"{name}ple_embedding.ngram_embedding."
    found = {f"{table}shard_{shard}.weight": (row_type, [2_500_012, 160]) for shard in range(128)}
    if fp8:
        found[f"{table}weight_scale"] = _bf16(1)
    return found | {
        f"{name}key_proj.weight": _bf16(STREAMS, HIDDEN),
        f"{name}value_proj.weight": _bf16(HIDDEN, HIDDEN),
        f"{name}norm_key.weight": _bf16(STREAMS),
        f"{name}norm_query.weight": _bf16(STREAMS),
        f"{name}norm_conv.weight": _bf16(STREAMS),
        f"{name}conv1d.weight": _bf16(STREAMS, 1, 4),
        f"{name}ple_embedding.layer_multipliers": ("I64", [3]),
        f"{name}ple_embedding.ngram_heads_vocab_sizes": ("I64", [16]),
        f"{name}ple_embedding.ngram_heads_offsets": ("I64", [16]),
    }


def _vision() -> Shapes:
    name = "model.visual."
    found = {
        f"{name}patch_embed.proj.weight": _bf16(1152, 3, 2, 16, 16),
        f"{name}patch_embed.proj.bias": _bf16(1152),
        f"{name}pos_embed.weight": _bf16(2304, 1152),
        f"{name}merger.norm.weight": _bf16(1152),
        f"{name}merger.norm.bias": _bf16(1152),
        f"{name}merger.linear_fc1.weight": _bf16(4608, 4608),
        f"{name}merger.linear_fc1.bias": _bf16(4608),
        f"{name}merger.linear_fc2.weight": _bf16(2560, 4608),
        f"{name}merger.linear_fc2.bias": _bf16(2560),
    }
    linear = {"attn.qkv": (3456, 1152), "attn.proj": (1152, 1152), "mlp.linear_fc1": (4304, 1152)}
    linear["mlp.linear_fc2"] = (1152, 4304)
    for block in range(27):
        for part, (out, width) in linear.items():
            found[f"{name}blocks.{block}.{part}.weight"] = _bf16(out, width)
            found[f"{name}blocks.{block}.{part}.bias"] = _bf16(out)
        for norm in ("norm1", "norm2"):
            found[f"{name}blocks.{block}.{norm}.weight"] = _bf16(1152)
            found[f"{name}blocks.{block}.{norm}.bias"] = _bf16(1152)
    return found
