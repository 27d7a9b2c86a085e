"""Makes a flat file of a checkpoint's table: whole or not at all."""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from tqdm import tqdm

from ple_daemon.errors import TableRefusedError
from ple_daemon.flat_file import SegmentSum, describe, read_sidecar, sidecar_path
from ple_daemon.source import open_table
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
    for path in (out, sidecar_path(out)):
        # A rename would put a file in the place of a device, too.
        if path.exists() and not path.is_file():
            raise TableRefusedError(f"{path}: is there and is no file; name a file that may be written")
    with open_table(source) as table:
        layout, fingerprint = table.layout, table.fingerprint.hex()
    if not force and _is_same(out, fingerprint):
        return False
    _check_name(source, layout, out)
    _check_space(out, layout)
    try:
        with _private_file(out.with_name(f".{out.name}.tmp")) as file:
            whole, sums = _copy(layout, file, out.name)
            text = json.dumps(describe(layout, fingerprint, whole, sums), indent=1) + "\n"
            _publish(Path(file.name), text, out)
    except OSError as error:
        raise TableRefusedError(f"{error.filename or out}: cannot be written: {error.strerror}") from error
    return True


@contextmanager
def _private_file(path: Path) -> Iterator[BinaryIO]:
    """A file that only this build writes; gone when the block fails. A dead build's is taken over."""
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise TableRefusedError(f"{path}: another build is writing this table; wait for it") from error
        file.truncate(0)
        try:
            yield file
        except BaseException:
            path.unlink(missing_ok=True)
            sidecar_path(path).unlink(missing_ok=True)
            raise


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


def _check_name(source: Path, layout: TableLayout, out: Path) -> None:
    """A rename replaces what it meets: not the table that is read, nor the description of another one."""
    if out.suffix == ".json":
        raise TableRefusedError(f"{out}: the name of a description; choose one like table.ple")
    files = {segment.path for segment in layout.segments}
    files |= set(source.iterdir()) if source.is_dir() else {source, sidecar_path(source)}
    for path in (out, sidecar_path(out)):
        if path.exists() and any(path.samefile(file) for file in files if file.exists()):
            raise TableRefusedError(f"{path}: belongs to the table that is read; choose another name")


def _check_space(out: Path, layout: TableLayout) -> None:
    if not out.parent.is_dir():
        raise TableRefusedError(f"{out.parent}: no such folder; make it first")
    free, needed = shutil.disk_usage(out.parent).free, layout.size_bytes + _SPARE_BYTES
    if free < needed:
        raise TableRefusedError(f"{out.parent}: {free:,} bytes free, the table needs {needed:,}")


def _copy(layout: TableLayout, file: BinaryIO, name: str) -> tuple[str, list[SegmentSum]]:
    """Write all rows in order and sync; returns the checksum of the whole and of each segment."""
    whole = hashlib.sha256()
    sums = []
    with tqdm(total=layout.size_bytes, unit="B", unit_scale=True, desc=f"build {name}") as bar:
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


def _publish(rows: Path, description: str, out: Path) -> None:
    """Rows first, their description last: a crash in between leaves a file that serve refuses."""
    temporary_sidecar = sidecar_path(rows)
    with temporary_sidecar.open("w", encoding="utf-8") as file:
        file.write(description)
        file.flush()
        os.fsync(file.fileno())
    sidecar_path(out).unlink(missing_ok=True)
    rows.rename(out)
    temporary_sidecar.rename(sidecar_path(out))
    folder = os.open(out.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
