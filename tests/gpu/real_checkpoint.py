"""A checkpoint of the released text shapes with fewer layers and experts, and non-degenerate weights.

Every tensor is drawn from a seed made of its name. The table's rows carry their numbers: no two are equal.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm
from transformers import Qwen4ExpForCausalLM, Qwen4ExpTextConfig
from transformers.models.qwen4_exp import modeling_qwen4_exp as qwen4_exp

from ple_inference.tiny.weights import number_rows

TABLE_PARTS = 8
PLE = "model.layers.1.ple.ple_embedding"
ROWS_PER_DRAW = 1 << 20


def text_config(layers: int, experts: int, table_rows_base: int) -> dict[str, Any]:
    """config.json of the text model; every shape but these three is the released one."""
    return {
        "architectures": ["Qwen4ExpForCausalLM"],
        "model_type": "qwen4_exp_text",
        "dtype": "bfloat16",
        "vocab_size": 248_320,
        "bos_token_id": 248_044,
        "eos_token_id": 248_044,
        "pad_token_id": None,
        "hidden_size": 2560,
        "hidden_act": "silu",
        "num_hidden_layers": layers,
        "full_attention_interval": 4,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * (layers // 4),
        "max_position_embeddings": 262_144,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "use_cache": True,
        "initializer_range": 0.02,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "num_attention_heads": 24,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25},
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
        "output_gate_type": "sigmoid",
        "num_experts": experts,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 640,
        "shared_expert_intermediate_size": 640,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "hc_count": 4,
        "hc_lowrank": 320,
        "ple_layer_ids": [2],
        "ple_embed_dim": 2560,
        "ple_conv_kernel_size": 4,
        "ngram_size": 3,
        "heads_per_ngram": 8,
        "ngram_vocab_size_base": table_rows_base,
        "make_ngram_vocab_size_divisible_by": 128,
        "split_ngram_parts": TABLE_PARTS,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "mtp": {
            "hybrid": True,
            "layer_types": ["full_attention"],
            "num_hidden_layers": 1,
            "rope_theta": 10_000_000,
        },
    }


def run(settings: dict[str, Any]) -> dict[str, Any]:
    write(Path(settings["model"]), settings["layers"], settings["experts"], settings["table_rows_base"])
    return {}


def write_config(folder: Path, config: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def write(folder: Path, layers: int, experts: int, table_rows_base: int) -> None:
    """Everything, one file a layer and one a part of the table."""
    config = text_config(layers, experts, table_rows_base)
    write_config(folder, config)
    shapes = shapes_of(config)
    table = f"{PLE}.ngram_embedding.weight"
    rows, elements = shapes.pop(table)
    groups: dict[str, list[str]] = {}
    for name in shapes:
        groups.setdefault(".".join(name.split(".")[:3]) if ".layers." in name else "rest", []).append(name)
    weight_map: dict[str, str] = {}
    files = len(groups) + TABLE_PARTS
    for number, names in enumerate(tqdm(groups.values(), desc="weights", leave=False), 1):
        tensors = {name: draw(name, shapes[name]) for name in names}
        if "layers.1" in names[0]:
            tensors |= hash_buffers(config)
        _save(folder, number, files, tensors, weight_map)
    parts = tqdm(table_parts(rows, elements), total=TABLE_PARTS, desc="table", leave=False)
    for number, (name, part) in enumerate(parts, len(groups) + 1):
        _save(folder, number, files, {name: part}, weight_map)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_table(folder: Path, config: dict[str, Any]) -> None:
    """Only what the daemon reads: for a model whose weights are made up."""
    write_config(folder, config)
    weight_map: dict[str, str] = {}
    _save(folder, 1, TABLE_PARTS + 1, hash_buffers(config), weight_map)
    rows, elements = shapes_of(config)[f"{PLE}.ngram_embedding.weight"]
    for number, (name, part) in enumerate(table_parts(rows, elements), 2):
        _save(folder, number, TABLE_PARTS + 1, {name: part}, weight_map)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )


def shapes_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model = Qwen4ExpForCausalLM(Qwen4ExpTextConfig(**config))
    return {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}


def draw(name: str, shape: tuple[int, ...]) -> Tensor:
    """bf16 on the CPU. A_log and dt_bias are what makes the linear layers forget at all."""
    generator = torch.Generator(device="cuda").manual_seed(zlib.crc32(name.encode()))
    tensor = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
    if name.endswith(("A_log", "dt_bias")):
        tensor.uniform_(-1, 1, generator=generator)
    elif "norm" in name:
        tensor.normal_(0, 0.1, generator=generator)
        if "linear_attn.norm" in name:
            tensor.add_(1)
    elif "embed" in name:
        tensor.normal_(0, 1, generator=generator)
    elif "conv1d" in name:
        tensor.normal_(0, 0.3, generator=generator)
    else:
        tensor.normal_(0, 1.2 / shape[-1] ** 0.5, generator=generator)
    return tensor.cpu()


def hash_buffers(config: dict[str, Any]) -> dict[str, Tensor]:
    text: Any = Qwen4ExpTextConfig(**config)
    heads = (text.ngram_size - 1) * text.heads_per_ngram
    own = qwen4_exp.Qwen4ExpTextNGramEmbedding(text, heads, layer_idx=1)
    names = ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")
    return {f"{PLE}.{name}": getattr(own, name).clone() for name in names}


def table_parts(rows: int, elements: int) -> Iterator[tuple[str, Tensor]]:
    per_part = -(-rows // TABLE_PARTS)
    for part in range(TABLE_PARTS):
        first, last = part * per_part, min((part + 1) * per_part, rows)
        name = f"{PLE}.ngram_embedding.shard_{part}.weight"
        generator = torch.Generator(device="cuda").manual_seed(part)
        values = torch.empty(last - first, elements, dtype=torch.bfloat16)
        for start in range(0, last - first, ROWS_PER_DRAW):
            piece = values[start : start + ROWS_PER_DRAW]
            drawn = torch.randn(piece.shape, device="cuda", generator=generator).to(torch.bfloat16)
            piece.copy_(number_rows(drawn.cpu(), first + start))
        yield name, values


def read_table(folder: Path) -> Tensor:
    """uint8 [rows, bytes of a row] of the whole table, in memory."""
    from safetensors import safe_open

    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    parts = []
    for part in range(TABLE_PARTS):
        name = f"{PLE}.ngram_embedding.shard_{part}.weight"
        with safe_open(folder / index[name], framework="pt") as file:
            parts.append(file.get_tensor(name))
    return torch.cat(parts).view(torch.uint8)


def _save(
    folder: Path, number: int, files: int, tensors: dict[str, Tensor], weight_map: dict[str, str]
) -> None:
    name = f"model-{number:05d}-of-{files:05d}.safetensors"
    save_file(tensors, folder / name, metadata={"format": "pt"})
    weight_map |= dict.fromkeys(tensors, name)
