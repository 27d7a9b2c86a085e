"""What a table is: rows of one type and width, in an ordered list of file segments."""

import enum
import math
import struct
from dataclasses import dataclass
from pathlib import Path

from ple_daemon.hash_constants import HashConstants

# The largest e4m3 and f16 numbers: a row that no half-precision model could hold has a broken scale.
_FP8_MAX = 448.0
_F16_MAX = 65504.0


class RowType(enum.Enum):
    """How a row element is stored. The daemon ships stored bytes and never converts them."""

    BF16 = "bf16"
    FP8_E4M3 = "fp8_e4m3"
    F32 = "f32"

    @property
    def element_bytes(self) -> int:
        return {RowType.BF16: 2, RowType.FP8_E4M3: 1, RowType.F32: 4}[self]


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive rows of the table, contiguous in one file."""

    path: Path
    offset_bytes: int
    rows: int


@dataclass(frozen=True, slots=True)
class TableLayout:
    """A table's description and where its rows lie. `scale` is the stored fp8 scale: 2, 4 or 0 bytes."""

    row_type: RowType
    row_elements: int
    rows: int
    scale: bytes
    constants: HashConstants
    segments: tuple[Segment, ...]

    @property
    def row_bytes(self) -> int:
        return self.row_elements * self.row_type.element_bytes

    @property
    def scale_bits(self) -> int:
        return int.from_bytes(self.scale, "little")

    @property
    def size_bytes(self) -> int:
        return self.rows * self.row_bytes


def scale_value(scale: bytes) -> float:
    """The number that a stored bf16 (2 bytes) or f32 (4 bytes) scale stands for."""
    padded = b"\0" * (4 - len(scale)) + scale  # bf16 is the upper half of an f32
    return float(struct.unpack("<f", padded)[0])


def is_usable_scale(scale: bytes) -> bool:
    """Whether the scale can be real: one never filled is 0, NaN or huge and gives fluent, wrong text."""
    value = scale_value(scale)
    return math.isfinite(value) and 0 < value * _FP8_MAX <= _F16_MAX
