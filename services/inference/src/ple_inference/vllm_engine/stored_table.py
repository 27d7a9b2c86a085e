"""Refuses an n-gram table in a form that the daemon or vLLM does not serve, or of which a part is missing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ple_inference.table_check import row_element_bytes
from ple_inference.vllm_engine.rank_modules import TABLE
from ple_inference.vllm_engine.refused import Refused
from ple_inference.vllm_engine.tensors import Tensor, Tensors

_SHARD = re.compile(r"shard_(\d{1,9})\.weight$")
_SCALE = "weight_scale"
_SCALE_TYPES = ("BF16", "F32")
_AGAIN = "download it again, or use another checkpoint"


def check_table(tensors: Tensors, config: dict[str, Any]) -> None:
    """The table may be elsewhere altogether: the daemon tells what it serves. Raises Refused."""
    table = {name.partition(TABLE)[2]: tensor for name, tensor in tensors.items() if TABLE in name}
    for name, tensor in table.items():
        if tensor.dtype == "U8" or name.endswith("weight_scale_2"):
            raise Refused(f"{_at(tensor, name)} is of an NVFP4 table; bf16 and fp8 are served")
        if tensor.dtype == "F32" and name != _SCALE:
            raise Refused(f"{_at(tensor, name)} is of an f32 table; bf16 and fp8 are served")
        if tensor.dtype.startswith("F8") and _SCALE not in table:
            raise Refused(f"{_at(tensor, name)} is fp8 and the table has no {_SCALE}; {_AGAIN}")
        if not _SHARD.match(name) and name != _SCALE:
            raise Refused(f"{_at(tensor, name)} is no part of a table that is served; {_AGAIN}")
    if scale := table.pop(_SCALE, None):
        _check_scale(scale)
    _check_shards(table, config)


def _check_scale(scale: Tensor) -> None:
    if scale.dtype not in _SCALE_TYPES or scale.shape not in ((), (1,)):
        raise Refused(
            f"{_at(scale, _SCALE)} is {scale.dtype} {list(scale.shape)}, not one BF16 or F32 number"
        )


def _check_shards(shards: Mapping[str, Tensor], config: dict[str, Any]) -> None:
    text = config.get("text_config", config)
    heads = (text["ngram_size"] - 1) * text["heads_per_ngram"]
    elements = (text.get("ple_embed_dim") or text["hidden_size"]) // heads
    dtype = "F8_E4M3" if row_element_bytes(config) == 1 else "BF16"
    parts = text.get("split_ngram_parts", len(shards)) if shards else 0
    for number in range(parts):
        if f"shard_{number}.weight" not in shards:
            raise Refused(f"the table has no shard_{number} of {parts} (split_ngram_parts); {_AGAIN}")
    for name, tensor in shards.items():
        if int(name.removeprefix("shard_").removesuffix(".weight")) >= parts:
            raise Refused(
                f"{_at(tensor, name)} is beyond the {parts} shards that split_ngram_parts says; {_AGAIN}"
            )
        if tensor.dtype != dtype or len(tensor.shape) != 2 or tensor.shape[1] != elements:
            raise Refused(
                f"{_at(tensor, name)} is {tensor.dtype} {list(tensor.shape)}, the config wants {dtype} "
                f"[rows, {elements}]; {_AGAIN}"
            )


def _at(tensor: Tensor, name: str) -> str:
    return f"{tensor.file.name}: ngram_embedding.{name}"
