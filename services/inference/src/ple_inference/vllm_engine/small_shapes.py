"""Shapes of the tensors that are no matrices of the decoder: norms, convolutions, hash constants, vision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ple_inference.vllm_engine.linear_shapes import RECURRENT
from ple_inference.vllm_engine.rank_modules import VISION

Shape = tuple[int | None, ...]
"""None: any number, where the config does not say."""
Shapes = dict[str, Shape]
_HASH = "ple.ple_embedding."


def decoder_shapes(text: Mapping[str, Any]) -> Shapes:
    """By a tensor's name without the decoder's prefix: layers.3.self_attn.q_norm.weight."""
    streams = text["hidden_size"] * text["hc_count"]
    (ple_layer,) = text["ple_layer_ids"]
    found: Shapes = {"hyper_connection_mixer.hc_norm.weight": (streams,)}
    for layer, kind in enumerate(text["layer_types"]):
        inner = _recurrent(text) if kind == RECURRENT else _attention(text)
        inner |= {f"{part}_hyper_connection.hc_norm.weight": (streams,) for part in ("attn", "mlp")}
        if layer == ple_layer - 1:
            inner |= _ple(text, streams)
        found |= {f"layers.{layer}.{name}": shape for name, shape in inner.items()}
    return found


def is_hash_constant(name: str) -> bool:
    """Whether a tensor of `decoder_shapes` is int64."""
    return f".{_HASH}" in name


def vision_shapes(vision: Mapping[str, Any], depth: int) -> Shapes:
    """By a tensor's name in the checkpoint. `depth`: how many blocks."""
    size = {name: number for name, number in vision.items() if type(number) is int}
    width, inner, patch = size.get("hidden_size"), size.get("intermediate_size"), size.get("patch_size")
    merged = width * size.get("spatial_merge_size", 2) ** 2 if width else None
    block: Shapes = {
        **_linear("attn.qkv", 3 * width if width else None, width),
        **_linear("attn.proj", width, width),
        **_linear("mlp.linear_fc1", inner, width),
        **_linear("mlp.linear_fc2", width, inner),
        **{f"norm{number}.{part}": (width,) for number in (1, 2) for part in ("weight", "bias")},
    }
    pixels = (size.get("in_channels"), size.get("temporal_patch_size"), patch, patch)
    found: Shapes = {
        "patch_embed.proj.weight": (width, *pixels),
        "patch_embed.proj.bias": (width,),
        "pos_embed.weight": (size.get("num_position_embeddings"), width),
        **{f"merger.norm.{part}": (width,) for part in ("weight", "bias")},
        **_linear("merger.linear_fc1", merged, merged),
        **_linear("merger.linear_fc2", size.get("out_hidden_size"), merged),
    }
    found |= {f"blocks.{number}.{name}": shape for number in range(depth) for name, shape in block.items()}
    return {f"{VISION}{name}": shape for name, shape in found.items()}


def fits(shape: tuple[int, ...], expected: Shape) -> bool:
    return len(shape) == len(expected) and all(
        wanted in (None, size) for size, wanted in zip(shape, expected, strict=True)
    )


def _recurrent(text: Mapping[str, Any]) -> Shapes:
    keys = text["linear_num_key_heads"] * text["linear_key_head_dim"]
    heads, head_size = text["linear_num_value_heads"], text["linear_value_head_dim"]
    return {
        "linear_attn.conv1d.weight": (2 * keys + heads * head_size, 1, text["linear_conv_kernel_dim"]),
        "linear_attn.norm.weight": (head_size,),
        "linear_attn.A_log": (heads,),
        "linear_attn.dt_bias": (heads,),
    }


def _attention(text: Mapping[str, Any]) -> Shapes:
    return {
        "self_attn.q_norm.weight": (text["head_dim"],),
        "self_attn.k_norm.weight": (text["head_dim"],),
        "self_attn.indexer.q_layernorm.weight": (text["indexer_head_dim"],),
        "self_attn.indexer.k_layernorm.weight": (text["indexer_head_dim"],),
    }


def _ple(text: Mapping[str, Any], streams: int) -> Shapes:
    heads = (text["ngram_size"] - 1) * text["heads_per_ngram"]
    return {
        **{f"ple.norm_{part}.weight": (streams,) for part in ("key", "query", "conv")},
        "ple.conv1d.weight": (streams, 1, text["ple_conv_kernel_size"]),
        f"{_HASH}layer_multipliers": (text["ngram_size"],),
        f"{_HASH}ngram_heads_vocab_sizes": (heads,),
        f"{_HASH}ngram_heads_offsets": (heads,),
    }


def _linear(name: str, rows: int | None, columns: int | None) -> Shapes:
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}
