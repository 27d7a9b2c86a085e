"""What a config.json must say before sizes and hash are computed from it."""

from __future__ import annotations

from typing import Any

from ple_inference.checkpoint import Checkpoint, CheckpointError
from ple_inference.vllm_engine.linear_shapes import ATTENTION, RECURRENT

# Of text_config.
_NUMBERS = (
    "num_hidden_layers",
    "vocab_size",
    "max_position_embeddings",
    "hidden_size",
    "head_dim",
    "num_attention_heads",
    "num_key_value_heads",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "indexer_n_heads",
    "indexer_kv_heads",
    "indexer_head_dim",
    "indexer_budget",
    "indexer_compress_ratio",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
    "hc_count",
    "hc_lowrank",
    "ple_conv_kernel_size",
    "ngram_size",
    "heads_per_ngram",
)
_NEEDED = (*_NUMBERS, "layer_types", "eos_token_id")
_OPTIONAL_NUMBERS = ("ple_embed_dim", "make_ngram_vocab_size_divisible_by", "split_ngram_parts")
_LARGEST = 2**31 - 1
_MOST_VISION_BLOCKS = 1000
_ARCHITECTURES = ("Qwen4ExpForConditionalGeneration", "Qwen4ExpForCausalLM")


def check_config(checkpoint: Checkpoint) -> None:
    """Raises CheckpointError for what is absent, of another type, or contradicts itself."""
    text, where = checkpoint.text, f"{checkpoint.path}/config.json"
    _check_architecture(checkpoint.config, where)
    missing = next((name for name in _NEEDED if text.get(name) is None), None)
    if missing is not None:
        raise CheckpointError(f"{where} has no text_config.{missing}")
    for name in (*_NUMBERS, *(name for name in _OPTIONAL_NUMBERS if text.get(name) is not None)):
        least = 2 if name == "ngram_size" else 1
        if type(text[name]) is not int or not least <= text[name] <= _LARGEST:
            raise CheckpointError(
                f"{where}: text_config.{name} is {_short(text[name])}, not a number of at least {least}"
            )
    if text["num_experts_per_tok"] > text["num_experts"]:
        raise CheckpointError(
            f"{where}: num_experts_per_tok is {text['num_experts_per_tok']} of {text['num_experts']} experts"
        )
    _check_layers(text, where)
    _check_rotary(text, where)
    _check_kinds(checkpoint.config, where)
    _check_vision(checkpoint.config, where)


def _check_architecture(config: dict[str, Any], where: str) -> None:
    given, whole = config.get("architectures"), "text_config" in config
    if not isinstance(given, list) or not given or given[0] not in _ARCHITECTURES:
        served = " or ".join(_ARCHITECTURES)
        raise CheckpointError(f"{where}: architectures is {_short(given)}, served is {served}")
    fitting = _ARCHITECTURES[0 if whole else 1]
    if given[0] != fitting:
        raise CheckpointError(
            f"{where}: architectures is {given[0]}; with{'' if whole else 'out'} a text_config it must be "
            f"{fitting}"
        )


def _check_layers(text: dict[str, Any], where: str) -> None:
    kinds, layers, (ple_layer,) = text["layer_types"], text["num_hidden_layers"], text["ple_layer_ids"]
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise CheckpointError(f"{where}: text_config.layer_types is no list of names")
    strange = next((kind for kind in kinds if kind not in (RECURRENT, *ATTENTION)), None)
    if strange is not None:
        raise CheckpointError(
            f"{where}: layer_types has {_short(strange)}, served are {RECURRENT}, full_attention"
        )
    if len(kinds) != layers:
        raise CheckpointError(f"{where} names {len(kinds)} layer_types for {layers} layers")
    if not 1 <= ple_layer <= layers:
        raise CheckpointError(f"{where}: ple_layer_ids names layer {ple_layer}, there are {layers}")


def _check_rotary(text: dict[str, Any], where: str) -> None:
    rope = text.get("rope_parameters")
    if rope is not None and not isinstance(rope, dict):
        raise CheckpointError(f"{where}: text_config.rope_parameters is no object")
    for given in (rope or {}, text):
        factor = given.get("partial_rotary_factor", 1)
        if type(factor) not in (int, float) or not 0 < factor <= 1:
            raise CheckpointError(
                f"{where}: partial_rotary_factor is {_short(factor)}, not a number above 0 and at most 1"
            )


def _check_kinds(config: dict[str, Any], where: str) -> None:
    text = config.get("text_config", config)
    eos = text["eos_token_id"]
    ids = eos if isinstance(eos, list) else [eos]
    if not ids or not all(type(id_) is int and 0 <= id_ <= _LARGEST for id_ in ids):
        raise CheckpointError(f"{where}: text_config.eos_token_id is {_short(eos)}, not a token's id")
    if not isinstance(config.get("quantization_config") or {}, dict):
        raise CheckpointError(f"{where}: quantization_config is no object")
    for dtype in (text.get("dtype"), config.get("dtype"), text.get("mamba_ssm_dtype")):
        if not isinstance(dtype or "", str):
            raise CheckpointError(f"{where}: dtype {_short(dtype)} is no name")


def _check_vision(config: dict[str, Any], where: str) -> None:
    vision = config.get("vision_config", {})
    if not isinstance(vision, dict):
        raise CheckpointError(f"{where}: vision_config is no object")
    depth = vision.get("depth", 1)
    if type(depth) is not int or not 1 <= depth <= _MOST_VISION_BLOCKS:
        raise CheckpointError(
            f"{where}: vision_config.depth is {_short(depth)}, not a number of 1 to {_MOST_VISION_BLOCKS}"
        )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
