"""Waits for the daemon and compares its table with the checkpoint's, before anything heavy is loaded."""

from __future__ import annotations

import logging
import struct
import time
from collections.abc import Callable
from typing import Any

from ple_inference.checkpoint import Checkpoint, CheckpointError
from ple_inference.table_check import (
    PROTOCOL_VERSION,
    NgramConstants,
    WrongTableError,
    check_scale,
    check_table,
    row_type_of,
)
from ple_inference.vllm_engine.refused import Refused
from ple_inference.vllm_engine.tensors import Tensors
from ple_rpc.client import TableClient
from ple_rpc.errors import TableError
from ple_rpc.table.v1 import table_service_pb2

_log = logging.getLogger(__name__)
_WAIT_LOG_INTERVAL_S = 5.0


def await_table(address: str, deadline_s: float, checkpoint: Checkpoint, tensors: Tensors) -> None:
    """Return once the daemon serves this checkpoint's table. Raises Refused, CheckpointError."""
    constants = ngram_constants(checkpoint.text, tensors)
    scale = table_scale(tensors)
    try:
        # No shared memory: this client only asks what the table is.
        with TableClient(address) as client:
            described = client.wait_ready(deadline_s, _log_waits(address))
        _check(described, constants, checkpoint.config, scale)
    except (TableError, WrongTableError, ValueError) as error:
        raise Refused(str(error)) from error
    table = described.table
    _log.info("table fits address=%s rows=%d row_bytes=%d", address, table.rows, table.row_bytes)


def _check(
    described: table_service_pb2.DescribeResponse,
    constants: NgramConstants,
    config: dict[str, Any],
    scale: float | None,
) -> None:
    if described.protocol_version != PROTOCOL_VERSION:
        raise WrongTableError(
            f"the daemon speaks protocol {described.protocol_version}, this service {PROTOCOL_VERSION}"
        )
    check_table(described.table, constants, row_type_of(config))
    if scale is not None:
        check_scale(described.table, scale)


def ngram_constants(text: dict[str, Any], tensors: Tensors) -> NgramConstants:
    """What the model will hash with: the checkpoint's own buffers. Raises CheckpointError."""
    try:
        prefix = next(name for name in tensors if name.endswith(".ple_embedding.layer_multipliers"))
        prefix = prefix.removesuffix("layer_multipliers")
        sizes = tensors.int64(f"{prefix}ngram_heads_vocab_sizes")
        divisor = int(text.get("make_ngram_vocab_size_divisible_by") or 128)
        heads_per_ngram = int(text["heads_per_ngram"])
        return NgramConstants(
            ngram_size=int(text["ngram_size"]),
            heads_per_ngram=heads_per_ngram,
            eos_token_id=_first(text["eos_token_id"]),
            multipliers=tensors.int64(f"{prefix}layer_multipliers"),
            head_sizes=sizes,
            head_offsets=tensors.int64(f"{prefix}ngram_heads_offsets"),
            rows=-(-sum(sizes) // divisor) * divisor,
            row_elements=int(text.get("ple_embed_dim") or text["hidden_size"]) // len(sizes),
        )
    except StopIteration:
        raise CheckpointError("the checkpoint has no ple_embedding.layer_multipliers to hash with") from None
    except KeyError as error:
        raise CheckpointError(f"the checkpoint has no {error.args[0]}") from error


def table_scale(tensors: Tensors) -> float | None:
    """The scale of an fp8 table; None for other tables. Raises CheckpointError."""
    name = next((name for name in tensors if name.endswith(".ngram_embedding.weight_scale")), None)
    if name is None:
        return None
    content = tensors.read(name)
    if tensors[name].dtype == "BF16" and len(content) == 2:
        content = b"\0\0" + content
    elif tensors[name].dtype != "F32" or len(content) != 4:
        raise CheckpointError(f"{tensors[name].file}: {name} is neither one BF16 nor one F32 number")
    (scale,) = struct.unpack("<f", content)
    return float(scale)


def _first(eos: Any) -> int:
    return int(eos[0] if isinstance(eos, list) else eos)


def _log_waits(address: str) -> Callable[[str], None]:
    last_s = -_WAIT_LOG_INTERVAL_S

    def log(reason: str) -> None:
        nonlocal last_s
        if time.monotonic() - last_s >= _WAIT_LOG_INTERVAL_S:
            last_s = time.monotonic()
            _log.info("waiting for the table daemon address=%s reason=%s", address, reason)

    return log
