"""A checkpoint in the INT4-mixed or FP8 layout with small shapes, in either architecture's names.

Kernels would refuse some of the shapes; vLLM's loaders do not. No two tensors are equal.
"""

from __future__ import annotations

import json
import re
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, WIDE, EXPERTS, VOCABULARY, LAYERS, STREAMS = 256, 1024, 4, 512, 4, 4
SHARDS = 4
# Ends of module names, and the scheme (bits, group size) of those modules.
SCHEMES = {
    r"\.experts\.\d+\.\w+": (4, 128),
    r"\.(in_proj_qkv|in_proj_z|out_proj|[qkvo]_proj)|shared_expert\.\w+_proj": (6, 64),
    r"hyper_connection\w*\.input_mix_weight_(down|up)": (8, 64),
    r"lm_head|embed_tokens|\.(key_proj|value_proj|index_qk_proj)": (8, 128),
}
TEXT: dict[str, Any] = {
    "model_type": "qwen4_exp_text",
    "dtype": "bfloat16",
    "vocab_size": VOCABULARY,
    "bos_token_id": 500,
    "eos_token_id": 500,
    "hidden_size": HIDDEN,
    "hidden_act": "silu",
    "num_hidden_layers": LAYERS,
    "full_attention_interval": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000_000,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
    },
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 128,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "mamba_ssm_dtype": "float32",
    "output_gate_type": "sigmoid",
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "hc_count": STREAMS,
    "hc_lowrank": 64,
    "ple_layer_ids": [2],
    "ple_embed_dim": 2560,
    "ple_conv_kernel_size": 4,
    "ngram_size": 3,
    "heads_per_ngram": 8,
    "ngram_vocab_size_base": 20,
    "make_ngram_vocab_size_divisible_by": 128,
    "split_ngram_parts": SHARDS,
}
VISION: dict[str, Any] = {
    "model_type": "qwen4_exp",
    "depth": 1,
    "hidden_size": 64,
    "num_heads": 2,
    "intermediate_size": 96,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "in_channels": 3,
    "out_hidden_size": HIDDEN,
    "num_position_embeddings": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "deepstack_visual_indexes": [],
}


def write(folder: Path, *, layout: str, images: bool = False, drop: str = "", config: Any = None) -> Path:
    """`layout`: int4-mixed, fp8 or bf16. Tensors whose name contains `drop` are left out of file and index.

    `config` replaces what config.json says of the quantization.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor for name, tensor in contents(layout, images) if not (drop and drop in name)}
    words = quantization_config(layout) if config is None else config
    told = {"quantization_config": words} if words else {}
    (folder / "config.json").write_text(json.dumps(model_config(images) | told))
    save_file(tensors, folder / "model-00001-of-00001.safetensors", metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def model_config(images: bool) -> dict[str, Any]:
    if not images:
        return {"architectures": ["Qwen4ExpForCausalLM"], **TEXT}
    return {
        "architectures": ["Qwen4ExpForConditionalGeneration"],
        "model_type": "qwen4_exp",
        "dtype": "bfloat16",
        "image_token_id": 506,
        "video_token_id": 507,
        "vision_start_token_id": 503,
        "vision_end_token_id": 504,
        "tie_word_embeddings": False,
        "text_config": TEXT,
        "vision_config": {"dtype": "bfloat16", **VISION},
    }


def quantization_config(layout: str) -> dict[str, Any]:
    if layout == "fp8":
        return {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    if layout == "bf16":
        return {}
    groups = {
        f"group_{number}": {"targets": [f"re:.*({ends})$"], "weights": arguments(*scheme)}
        for number, (ends, scheme) in enumerate(SCHEMES.items())
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ["re:.*visual.*", "re:^mtp.*"],
    }


def arguments(bits: int, group_size: int) -> dict[str, Any]:
    return {
        "num_bits": bits,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": group_size,
        "dynamic": False,
    }


def contents(layout: str, images: bool) -> list[tuple[str, Tensor]]:
    prefix = "model.language_model." if images else "model."
    found: list[tuple[str, Tensor]] = []
    for name, shape in shapes(prefix).items():
        found += _stored(name, shape, layout)
    found += [(f"{prefix}layers.1.ple.ple_embedding.{name}", value) for name, value in _table(layout)]
    if images:
        found += [(name, _drawn(name, shape)) for name, shape in _vision_shapes().items()]
    return [*found, ("mtp.fc_embedding.weight", _drawn("mtp.fc_embedding.weight", (HIDDEN, HIDDEN)))]


def shapes(prefix: str) -> dict[str, tuple[int, ...]]:
    """Of all weights but the table, by their names in the checkpoint as BF16 would have them."""
    found: dict[str, tuple[int, ...]] = {
        "lm_head.weight": (VOCABULARY, HIDDEN),
        f"{prefix}embed_tokens.weight": (VOCABULARY, HIDDEN),
    }
    found |= _residual(f"{prefix}hyper_connection_mixer", inject=False)
    for layer in range(LAYERS):
        at = f"{prefix}layers.{layer}"
        found |= _attention(at) if layer % 4 == 3 else _recurrent(at)
        found |= _residual(f"{at}.attn_hyper_connection") | _residual(f"{at}.mlp_hyper_connection")
        found |= _experts(f"{at}.mlp")
    return found | _ngram(f"{prefix}layers.1.ple")


def _attention(at: str) -> dict[str, tuple[int, ...]]:
    sizes = {"q": (1024, HIDDEN), "k": (256, HIDDEN), "v": (256, HIDDEN), "o": (HIDDEN, 512)}
    found = {f"{at}.self_attn.{name}_proj.weight": size for name, size in sizes.items()}
    found |= {f"{at}.self_attn.{name}_norm.weight": (256,) for name in ("q", "k")}
    found |= {f"{at}.self_attn.indexer.{name}_layernorm.weight": (128,) for name in ("q", "k")}
    return found | {f"{at}.self_attn.indexer.index_qk_proj.weight": (640, HIDDEN)}


def _recurrent(at: str) -> dict[str, tuple[int, ...]]:
    sizes = {
        "in_proj_qkv": (1024, HIDDEN),
        "in_proj_z": (512, HIDDEN),
        "in_proj_b": (4, HIDDEN),
        "in_proj_a": (4, HIDDEN),
        "conv1d": (1024, 1, 4),
        "out_proj": (HIDDEN, 512),
        "norm": (128,),
    }
    found = {f"{at}.linear_attn.{name}.weight": size for name, size in sizes.items()}
    return found | {f"{at}.linear_attn.{name}": (4,) for name in ("dt_bias", "A_log")}


def _residual(at: str, *, inject: bool = True) -> dict[str, tuple[int, ...]]:
    found = {
        f"{at}.hc_norm.weight": (WIDE,),
        f"{at}.input_mix_weight_down.weight": (64, WIDE),
        f"{at}.input_mix_weight_up.weight": (WIDE, 64),
    }
    return found | ({f"{at}.block_inject_weight.weight": (STREAMS, WIDE)} if inject else {})


def _experts(at: str) -> dict[str, tuple[int, ...]]:
    sizes = {"gate_proj": (128, HIDDEN), "up_proj": (128, HIDDEN), "down_proj": (HIDDEN, 128)}
    found: dict[str, tuple[int, ...]] = {f"{at}.gate.weight": (EXPERTS, HIDDEN)}
    found |= {f"{at}.shared_expert_gate.weight": (1, HIDDEN)}
    for owner in ("shared_expert", *(f"experts.{number}" for number in range(EXPERTS))):
        found |= {f"{at}.{owner}.{name}.weight": size for name, size in sizes.items()}
    return found


def _ngram(at: str) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {f"{at}.norm_{name}.weight": (WIDE,) for name in ("key", "query", "conv")}
    return found | {
        f"{at}.key_proj.weight": (WIDE, 2560),
        f"{at}.value_proj.weight": (HIDDEN, 2560),
        f"{at}.conv1d.weight": (WIDE, 1, 4),
    }


def _vision_shapes() -> dict[str, tuple[int, ...]]:
    sizes = {
        "patch_embed.proj": (64, 3, 2, 16, 16),
        "blocks.0.norm1": (64,),
        "blocks.0.norm2": (64,),
        "blocks.0.attn.qkv": (192, 64),
        "blocks.0.attn.proj": (64, 64),
        "blocks.0.mlp.linear_fc1": (96, 64),
        "blocks.0.mlp.linear_fc2": (64, 96),
        "merger.norm": (64,),
        "merger.linear_fc1": (256, 256),
        "merger.linear_fc2": (HIDDEN, 256),
    }
    found: dict[str, tuple[int, ...]] = {"model.visual.pos_embed.weight": (256, 64)}
    for name, size in sizes.items():
        found |= {f"model.visual.{name}.weight": size, f"model.visual.{name}.bias": size[:1]}
    return found


def _stored(name: str, shape: tuple[int, ...], layout: str) -> list[tuple[str, Tensor]]:
    module = name.removesuffix(".weight")
    if layout == "fp8" and ".experts." in name:
        blocks = tuple(-(-size // 128) for size in shape)
        scale = _drawn(f"{module}.weight_scale_inv", blocks)
        return [(name, _drawn(name, shape).to(torch.float8_e4m3fn)), (f"{module}.weight_scale_inv", scale)]
    scheme = scheme_of(name) if layout == "int4-mixed" else None
    if scheme is None:
        return [(name, _drawn(name, shape))]
    (bits, group_size), (rows, columns) = scheme, shape
    words = torch.randint(-(2**31), 2**31, (rows, columns * bits // 32), generator=_seeded(name))
    return [
        (f"{module}.weight_packed", words.to(torch.int32)),
        (f"{module}.weight_scale", _drawn(f"{module}.weight_scale", (rows, columns // group_size)).half()),
        (f"{module}.weight_shape", torch.tensor([rows, columns])),
    ]


def scheme_of(name: str) -> tuple[int, int] | None:
    module = name.removesuffix(".weight")
    return next((scheme for ends, scheme in SCHEMES.items() if re.search(f"({ends})$", module)), None)


def _table(layout: str) -> list[tuple[str, Tensor]]:
    rows = 768 // SHARDS
    dtype = torch.float8_e4m3fn if layout == "fp8" else torch.bfloat16
    shards = [
        (f"ngram_embedding.shard_{part}.weight", _drawn(f"shard_{part}", (rows, 160)).to(dtype))
        for part in range(SHARDS)
    ]
    constants = [
        ("layer_multipliers", torch.arange(3)),
        ("ngram_heads_vocab_sizes", torch.arange(16)),
        ("ngram_heads_offsets", torch.arange(16)),
    ]
    scale = [("ngram_embedding.weight_scale", torch.tensor([0.5], dtype=torch.bfloat16))]
    return shards + constants + (scale if layout == "fp8" else [])


def _drawn(name: str, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=_seeded(name)).to(torch.bfloat16)


def _seeded(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(name.encode()))
