"""Refuses an n-gram table in a form that the daemon or vLLM does not serve, or of which a part is missing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ple_inference.table_check import row_element_bytes
from ple_inference.vllm_engine.rank_modules import TABLE
from ple_inference.vllm_engine.refused import Refused
from ple_inference.vllm_engine.stored_names import AGAIN, OTHER_CONFIG
from ple_inference.vllm_engine.tensors import Tensor, Tensors

_SHARD = re.compile(r".*\.shard_(\d{1,9})\.weight$")
_SCALE = ".weight_scale"
_SCALE_TYPES = ("BF16", "F32")


def check_table(tensors: Tensors, config: dict[str, Any]) -> None:
    """The table may be elsewhere altogether: the daemon tells what it serves. Raises Refused."""
    table = {name: tensor for name, tensor in tensors.items() if TABLE in name}
    is_scaled = any(name.endswith(_SCALE) for name in table)
    shards: dict[int, str] = {}
    for name, tensor in table.items():
        where = f"{tensor.file.name}: {name}"
        if tensor.dtype == "U8" or name.endswith("weight_scale_2"):
            raise Refused(f"{where} is of an NVFP4 table; bf16 and fp8 are served; use another checkpoint")
        if name.endswith(_SCALE):
            _check_scale(where, tensor)
            continue
        if tensor.dtype == "F32":
            raise Refused(f"{where} is of an f32 table; bf16 and fp8 are served; use another checkpoint")
        if tensor.dtype.startswith("F8") and not is_scaled:
            raise Refused(f"{where} is fp8 and the table has no weight_scale; {AGAIN}")
        shard = _SHARD.match(name)
        if not shard or int(shard[1]) in shards:
            raise Refused(f"{where} is no part of a table that is served; {AGAIN}")
        shards[int(shard[1])] = name
    if shards:
        _check_shards(shards, table, config, is_scaled=is_scaled)


def _check_scale(where: str, scale: Tensor) -> None:
    if scale.dtype not in _SCALE_TYPES or scale.shape not in ((), (1,)):
        raise Refused(
            f"{where} is {scale.dtype} {list(scale.shape)}, not one {' or '.join(_SCALE_TYPES)} number; "
            f"{AGAIN}"
        )


def _check_shards(
    shards: Mapping[int, str], table: Mapping[str, Tensor], config: dict[str, Any], *, is_scaled: bool
) -> None:
    text = config.get("text_config", config)
    heads = (text["ngram_size"] - 1) * text["heads_per_ngram"]
    elements = (text.get("ple_embed_dim") or text["hidden_size"]) // heads
    is_fp8 = row_element_bytes(config) == 1
    if is_scaled and not is_fp8:
        raise Refused(
            f"the table has a weight_scale, and config.json says that its rows are bf16; {OTHER_CONFIG}"
        )
    dtype, parts = "F8_E4M3" if is_fp8 else "BF16", text.get("split_ngram_parts") or len(shards)
    missing = next((number for number in range(parts) if number not in shards), None)
    if missing is not None:
        raise Refused(f"the table has no shard_{missing} of {parts} (split_ngram_parts); {AGAIN}")
    for number, name in shards.items():
        tensor = table[name]
        where = f"{tensor.file.name}: {name}"
        if number >= parts:
            raise Refused(f"{where} is beyond the {parts} shards that split_ngram_parts says; {OTHER_CONFIG}")
        if tensor.dtype != dtype or len(tensor.shape) != 2 or tensor.shape[1] != elements:
            raise Refused(
                f"{where} is {tensor.dtype} {list(tensor.shape)}, the config wants {dtype} "
                f"[rows, {elements}]; {OTHER_CONFIG}"
            )
