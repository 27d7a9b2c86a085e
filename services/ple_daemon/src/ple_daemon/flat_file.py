"""The flat form of a table: all rows in `NAME.ple`, described by `NAME.ple.json` beside it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ple_daemon.errors import TableRefusedError
from ple_daemon.hash_constants import HashConstants
from ple_daemon.strict_json import read_object
from ple_daemon.table_format import RowType, Segment, TableLayout, is_usable_scale

FORMAT = "ple-table-1"
_INT64 = 1 << 63


@dataclass(frozen=True, slots=True)
class SegmentSum:
    """SHA-256 of the rows that came from one source segment."""

    source: str
    rows: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Sidecar:
    """What the JSON file says: the table, and checksums of the whole and of each source segment."""

    layout: TableLayout
    fingerprint: str
    sha256: str
    segments: tuple[SegmentSum, ...]


def sidecar_path(table: Path) -> Path:
    return table.with_name(table.name + ".json")


def describe(
    layout: TableLayout, fingerprint: str, sha256: str, segments: list[SegmentSum]
) -> dict[str, Any]:
    """The sidecar's JSON object."""
    constants = layout.constants
    return {
        "format": FORMAT,
        "row_type": layout.row_type.value,
        "row_elements": layout.row_elements,
        "rows": layout.rows,
        "scale_hex": layout.scale.hex(),
        "hash": {
            "ngram_size": constants.ngram_size,
            "heads_per_ngram": constants.heads_per_ngram,
            "eos_token_id": constants.eos_token_id,
            "multipliers": list(constants.multipliers),
            "head_sizes": list(constants.head_sizes),
            "head_offsets": list(constants.head_offsets),
        },
        "fingerprint": fingerprint,
        "sha256": sha256,
        "segments": [{"source": s.source, "rows": s.rows, "sha256": s.sha256} for s in segments],
    }


def read_sidecar(table: Path) -> Sidecar:
    """The sidecar of the flat file `table`. Raises TableRefusedError; the size of `table` is checked too."""
    path = sidecar_path(table)
    if not path.is_file():
        raise TableRefusedError(f"{table}: its description {path.name} is missing; build the file again")
    fields = read_object(path)
    if fields.get("format") != FORMAT:
        raise TableRefusedError(f"{path}: format is {fields.get('format')!r}, this version reads {FORMAT!r}")
    try:
        sidecar = _sidecar(table, fields)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise TableRefusedError(f"{path}: malformed: {type(error).__name__}: {error}") from error
    _check(table, path, sidecar)
    return sidecar


def _sidecar(table: Path, fields: dict[str, Any]) -> Sidecar:
    numbers = fields["hash"]
    constants = HashConstants(
        ngram_size=int(numbers["ngram_size"]),
        heads_per_ngram=int(numbers["heads_per_ngram"]),
        eos_token_id=int(numbers["eos_token_id"]),
        multipliers=tuple(int(value) for value in numbers["multipliers"]),
        head_sizes=tuple(int(value) for value in numbers["head_sizes"]),
        head_offsets=tuple(int(value) for value in numbers["head_offsets"]),
    )
    layout = TableLayout(
        row_type=RowType(fields["row_type"]),
        row_elements=int(fields["row_elements"]),
        rows=int(fields["rows"]),
        scale=bytes.fromhex(fields["scale_hex"]),
        constants=constants,
        segments=(Segment(table, 0, int(fields["rows"])),),
    )
    sums = tuple(SegmentSum(str(s["source"]), int(s["rows"]), str(s["sha256"])) for s in fields["segments"])
    return Sidecar(layout, str(fields["fingerprint"]), str(fields["sha256"]), sums)


def _check(table: Path, path: Path, sidecar: Sidecar) -> None:
    layout = sidecar.layout
    constants = layout.constants
    heads = (constants.ngram_size - 1) * constants.heads_per_ngram
    shapes = (len(constants.multipliers), len(constants.head_sizes), len(constants.head_offsets))
    if shapes != (constants.ngram_size, heads, heads) or heads <= 0 or min(constants.head_sizes) <= 0:
        raise TableRefusedError(f"{path}: hash constants do not fit together")
    numbers = constants.eos_token_id, *constants.multipliers, *constants.head_sizes
    if not all(-_INT64 <= number < _INT64 for number in numbers):
        raise TableRefusedError(f"{path}: hash constants do not fit in 64 bits")
    offsets = tuple(sum(constants.head_sizes[:head]) for head in range(heads))
    if constants.head_offsets != offsets or constants.used_rows > layout.rows or layout.row_elements <= 0:
        raise TableRefusedError(f"{path}: hash constants do not fit a table of {layout.rows} rows")
    if (layout.row_type is RowType.FP8_E4M3) != bool(layout.scale):
        raise TableRefusedError(
            f"{path}: {layout.row_type.value} rows with a scale of {len(layout.scale)} bytes"
        )
    if layout.scale and (len(layout.scale) not in (2, 4) or not is_usable_scale(layout.scale)):
        raise TableRefusedError(f"{path}: scale {layout.scale.hex()} is no usable scale")
    if sum(segment.rows for segment in sidecar.segments) != layout.rows:
        raise TableRefusedError(f"{path}: its segments do not add up to {layout.rows} rows")
    size = table.stat().st_size
    if size != layout.size_bytes:
        raise TableRefusedError(f"{table}: has {size} bytes, {path.name} says {layout.size_bytes}")
