"""Refuses a daemon whose table is not the model's."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from ple_rpc.table.v1 import table_pb2

PROTOCOL_VERSION = 1
_ROW_TYPES = {
    "bfloat16": table_pb2.ROW_TYPE_BF16,
    "float32": table_pb2.ROW_TYPE_F32,
}


class WrongTableError(Exception):
    """The daemon serves another table than the checkpoint needs; one line."""


@dataclass(frozen=True)
class NgramConstants:
    """Hash and shape of the table that a model was trained with."""

    ngram_size: int
    heads_per_ngram: int
    eos_token_id: int
    multipliers: tuple[int, ...]
    head_sizes: tuple[int, ...]
    head_offsets: tuple[int, ...]
    rows: int
    row_elements: int


def check_table(
    table: table_pb2.TableDescription, constants: NgramConstants, row_type: table_pb2.RowType
) -> None:
    """Compare what the daemon says with what the model needs. Raises WrongTableError."""
    expected = {
        "row type": (table_pb2.RowType.Name(table.row_type), table_pb2.RowType.Name(row_type)),
        "elements of a row": (table.row_elements, constants.row_elements),
        "rows": (table.rows, constants.rows),
        "n-gram size": (table.hash.ngram_size, constants.ngram_size),
        "heads per n-gram": (table.hash.heads_per_ngram, constants.heads_per_ngram),
        "EOS": (table.hash.eos_token_id, constants.eos_token_id),
        "multipliers": (tuple(table.hash.multipliers), constants.multipliers),
        "head sizes": (tuple(table.hash.head_sizes), constants.head_sizes),
        "head offsets": (tuple(table.hash.head_offsets), constants.head_offsets),
    }
    for what, (served, needed) in expected.items():
        _compare(what, served, needed)


def check_scale(table: table_pb2.TableDescription, needed: float) -> None:
    """Compare the scale of fp8 rows with the one that the model loaded. Raises WrongTableError."""
    bits = table.scale_bits << 16 if table.scale_bytes == 2 else table.scale_bits
    _compare("scale", struct.unpack("<f", bits.to_bytes(4, "little"))[0], needed)


def row_type_of(config: dict[str, Any]) -> table_pb2.RowType:
    """The row type of a config.json. fp8 checkpoints convert the table along with the experts."""
    if (config.get("quantization_config") or {}).get("quant_method") == "fp8":
        return table_pb2.ROW_TYPE_FP8_E4M3
    dtype = config.get("text_config", config).get("dtype") or config.get("dtype") or "bfloat16"
    return _ROW_TYPES.get(dtype, table_pb2.ROW_TYPE_UNSPECIFIED)


def row_element_bytes(config: dict[str, Any]) -> int:
    """Of the table of a config.json, as an engine on GPUs holds rows: 1 in fp8, else 2."""
    return 1 if row_type_of(config) == table_pb2.ROW_TYPE_FP8_E4M3 else 2


def _compare(what: str, served: object, needed: object) -> None:
    if served != needed:
        raise WrongTableError(
            f"the daemon's table does not fit the model: {what} {_short(served)} instead of "
            f"{_short(needed)}; point the daemon at the table of this checkpoint"
        )


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."
