"""Makes a flat file of a checkpoint's table: whole or not at all."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from ple_daemon.errors import TableRefusedError
from ple_daemon.flat_file import SegmentSum, describe, read_sidecar, sidecar_path
from ple_daemon.source import read_layout
from ple_daemon.table import Table
from ple_daemon.table_format import Segment, TableLayout

_CHUNK_BYTES = 8 * 1024 * 1024
# Beside the rows: the sidecar, and what the file system needs for itself.
_SPARE_BYTES = 16 * 1024 * 1024


def build(source: Path, out: Path, *, force: bool = False) -> bool:
    """Write `out` and its sidecar; False when `out` already is this table and `force` is not set.

    The old file is replaced in one step at the end; an interrupted build leaves no new file. Raises
    TableRefusedError.
    """
    layout = read_layout(source)
    with Table(layout) as table:
        fingerprint = table.fingerprint.hex()
    if not force and _is_same(out, fingerprint):
        return False
    _check_space(out, layout)
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    temporary_sidecar = sidecar_path(temporary)
    try:
        whole, sums = _copy(layout, temporary)
        text = json.dumps(describe(layout, fingerprint, whole, sums), indent=1) + "\n"
        _write_synced(temporary_sidecar, text)
        _publish(temporary, temporary_sidecar, out)
    except OSError as error:
        raise TableRefusedError(f"{error.filename or out}: cannot be written: {error.strerror}") from error
    finally:
        temporary.unlink(missing_ok=True)
        temporary_sidecar.unlink(missing_ok=True)
    return True


def _is_same(out: Path, fingerprint: str) -> bool:
    """Whether `out` holds this very table, by size, description and sampled rows."""
    if not out.is_file():
        return False
    try:
        sidecar = read_sidecar(out)
        if sidecar.fingerprint != fingerprint:
            return False
        with Table(sidecar.layout) as table:
            return table.fingerprint.hex() == fingerprint
    except TableRefusedError:
        return False


def _check_space(out: Path, layout: TableLayout) -> None:
    if not out.parent.is_dir():
        raise TableRefusedError(f"{out.parent}: no such folder; make it first")
    free, needed = shutil.disk_usage(out.parent).free, layout.size_bytes + _SPARE_BYTES
    if free < needed:
        raise TableRefusedError(f"{out.parent}: {free:,} bytes free, the table needs {needed:,}")


def _copy(layout: TableLayout, target: Path) -> tuple[str, list[SegmentSum]]:
    """Write all rows in order; returns the checksum of the whole and of each segment."""
    whole = hashlib.sha256()
    sums = []
    bar = tqdm(total=layout.size_bytes, unit="B", unit_scale=True, desc=f"build {target.name}")
    with bar, target.open("xb") as file:
        for segment in layout.segments:
            part = hashlib.sha256()
            for chunk in _chunks(segment, layout.row_bytes):
                file.write(chunk)
                whole.update(chunk)
                part.update(chunk)
                bar.update(len(chunk))
            sums.append(SegmentSum(segment.path.name, segment.rows, part.hexdigest()))
        file.flush()
        os.fsync(file.fileno())
    return whole.hexdigest(), sums


def _chunks(segment: Segment, row_bytes: int) -> Iterator[bytes]:
    left = segment.rows * row_bytes
    with segment.path.open("rb") as file:
        file.seek(segment.offset_bytes)
        while left:
            chunk = file.read(min(_CHUNK_BYTES, left))
            if not chunk:
                raise TableRefusedError(f"{segment.path}: became shorter during the build")
            left -= len(chunk)
            yield chunk


def _write_synced(path: Path, text: str) -> None:
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _publish(temporary: Path, temporary_sidecar: Path, out: Path) -> None:
    """Rows first, their description last: a crash in between leaves a file that serve refuses."""
    sidecar_path(out).unlink(missing_ok=True)
    temporary.rename(out)
    temporary_sidecar.rename(sidecar_path(out))
    folder = os.open(out.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
