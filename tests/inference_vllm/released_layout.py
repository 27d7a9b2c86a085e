"""Names and shapes of the released checkpoints' tensors, of which the published byte totals are the check.

Three forms: bf16, fp8 and int4-mixed, whose own files were not seen.
"""

from __future__ import annotations

import struct
from json import dumps
from math import prod
from pathlib import Path
from typing import Any

from ple_inference.quantized.scheme import PACKED, SCALE, SHAPE, quantization_config, scheme_of

Shapes = dict[str, tuple[str, list[int]]]
BF16_BYTES = 359_999_963_128
FP8_BYTES = 185_502_232_570
HIDDEN, STREAMS, EXPERTS, EXPERT_WIDTH = 2560, 10_240, 512, 640
PREFIX = "model.language_model."
FP8 = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_convert": ["ple.ple_embedding.ngram_embedding"],
}
ITEM_BYTES = {"BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "F32": 4, "I32": 4, "I64": 8, "U8": 1}

TEXT: dict[str, Any] = {
    "model_type": "qwen4_exp_text",
    "vocab_size": 248_320,
    "eos_token_id": 248_044,
    "num_hidden_layers": 48,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 12,
    "max_position_embeddings": 262_144,
    "hidden_size": HIDDEN,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "num_attention_heads": 24,
    "num_key_value_heads": 2,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": EXPERT_WIDTH,
    "shared_expert_intermediate_size": EXPERT_WIDTH,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 128,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "mamba_ssm_dtype": "float32",
    "hc_count": 4,
    "hc_lowrank": 320,
    "ple_layer_ids": [2],
    "ple_embed_dim": 2560,
    "ple_conv_kernel_size": 4,
    "ngram_size": 3,
    "split_ngram_parts": 128,
    "heads_per_ngram": 8,
}


def config(
    form: str = "bf16", layers: int = 48, *, text_only: bool = False, experts: int = EXPERTS
) -> dict[str, Any]:
    fewer = {"num_hidden_layers": layers, "layer_types": TEXT["layer_types"][:layers]}
    text = TEXT | fewer | {"num_experts": experts, "num_experts_per_tok": min(10, experts)}
    quantization: dict[str, Any] = {}
    if form == "fp8":
        quantization = {"quantization_config": FP8}
    elif form == "int4-mixed":
        prefix = "model." if text_only else PREFIX
        quantization = {"quantization_config": quantization_config(layers, prefix)}
    if text_only:
        return {"architectures": ["Qwen4ExpForCausalLM"], **text, **quantization}
    architecture = {"architectures": ["Qwen4ExpForConditionalGeneration"], "model_type": "qwen4_exp"}
    return {**architecture, "text_config": text, "vision_config": {}, **quantization}


def tensors(
    form: str = "bf16", layers: int = 48, *, text_only: bool = False, experts: int = EXPERTS
) -> Shapes:
    found: Shapes = {}
    for layer, kind in enumerate(TEXT["layer_types"][:layers]):
        name = f"{PREFIX}layers.{layer}."
        attention = _qsa() if kind == "full_attention" else _gdn()
        found |= {name + part: shape for part, shape in (attention | _moe(form, experts) | _mixers()).items()}
    found |= _ple(form)
    found[f"{PREFIX}embed_tokens.weight"] = found["lm_head.weight"] = _bf16(248_320, HIDDEN)
    found |= {f"{PREFIX}hyper_connection_mixer.{part}": shape for part, shape in _mixer().items()}
    if form == "int4-mixed":
        found = _packed(found)
    if text_only:
        return {name.replace(PREFIX, "model."): shape for name, shape in found.items()}
    return found | _draft(form, experts) | _vision()


def write(folder: Path, form: str, layers: int = 48, **options: Any) -> None:
    """A folder with all headers, whose tensors are holes, in one file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(dumps(config(form, layers, **options)))
    (folder / "tokenizer.json").write_text("{}")
    write_headers(folder, tensors(form, layers, **options))


def write_headers(folder: Path, shapes: Shapes) -> None:
    header, end = {}, 0
    for name, (dtype, shape) in shapes.items():
        start, end = end, end + ITEM_BYTES[dtype] * prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    content = dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(content)) + content)
        file.truncate(8 + len(content) + end)
    index = {"weight_map": dict.fromkeys(shapes, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(dumps(index))


def _packed(shapes: Shapes) -> Shapes:
    found: Shapes = {}
    for name, (dtype, shape) in shapes.items():
        scheme = scheme_of(name)
        if scheme is None or not name.endswith(".weight"):
            found[name] = dtype, shape
            continue
        module, (rows, columns) = name.removesuffix(".weight"), shape
        found[module + PACKED] = "I32", list(scheme.packed_shape(rows, columns))
        found[module + SCALE] = "F16", list(scheme.scale_shape(rows, columns))
        found[module + SHAPE] = "I64", [2]
    return found


def _draft(form: str, experts: int) -> Shapes:
    # The draft layer of the INT4-mixed checkpoint is BF16.
    form = "bf16" if form == "int4-mixed" else form
    found = {
        f"mtp.layers.0.{part}": shape for part, shape in (_qsa() | _moe(form, experts) | _mixers()).items()
    }
    found |= {f"mtp.hyper_connection_mixer.{part}": shape for part, shape in _mixer().items()}
    return found | {
        "mtp.pre_fc_norm_embedding.weight": _bf16(HIDDEN),
        "mtp.pre_fc_norm_hidden.weight": _bf16(STREAMS),
        "mtp.fc_embedding.weight": _bf16(HIDDEN, HIDDEN),
        "mtp.fc_hidden.weight": _bf16(HIDDEN, HIDDEN),
    }


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


def _moe(form: str, experts: int) -> Shapes:
    common = {
        "mlp.gate.weight": _bf16(experts, HIDDEN),
        "mlp.shared_expert.gate_proj.weight": _bf16(EXPERT_WIDTH, HIDDEN),
        "mlp.shared_expert.up_proj.weight": _bf16(EXPERT_WIDTH, HIDDEN),
        "mlp.shared_expert.down_proj.weight": _bf16(HIDDEN, EXPERT_WIDTH),
        "mlp.shared_expert_gate.weight": _bf16(1, HIDDEN),
    }
    if form == "bf16":
        return common | {
            "mlp.experts.gate_up_proj": _bf16(experts, 2 * EXPERT_WIDTH, HIDDEN),
            "mlp.experts.down_proj": _bf16(experts, HIDDEN, EXPERT_WIDTH),
        }
    for expert in range(experts):
        for part, shape in (("gate", (640, 2560)), ("up", (640, 2560)), ("down", (2560, 640))):
            name = f"mlp.experts.{expert}.{part}_proj.weight"
            common[name] = _bf16(*shape)
            if form == "fp8":
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


def _ple(form: str) -> Shapes:
    name = f"{PREFIX}layers.1.ple."
    row_type = "F8_E4M3" if form == "fp8" else "BF16"
    table = f"{name}ple_embedding.ngram_embedding."
    found = {f"{table}shard_{shard}.weight": (row_type, [2_500_012, 160]) for shard in range(128)}
    if form == "fp8":
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
