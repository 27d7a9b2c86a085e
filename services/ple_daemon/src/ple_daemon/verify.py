"""Reads every byte of a table and compares it with recorded checksums, naming what differs."""

import hashlib
import json
import os
from pathlib import Path
from typing import NoReturn

from tqdm import tqdm

from ple_daemon.checkpoint import read_checkpoint
from ple_daemon.errors import TableRefusedError
from ple_daemon.flat_file import read_sidecar
from ple_daemon.strict_json import read_object

MANIFEST_NAME = "ple-checksums.json"
_FORMAT = "ple-checksums-1"
_CHUNK_BYTES = 8 * 1024 * 1024


def verify(table: Path) -> int:
    """Check a flat file against its sidecar, a checkpoint against its manifest; returns the sums compared.

    Raises TableRefusedError that names every bad file or segment.
    """
    if not table.exists():
        raise TableRefusedError(f"{table}: does not exist")
    return _verify_checkpoint(table) if table.is_dir() else _verify_flat(table)


def write_manifest(checkpoint: Path) -> Path:
    """Record the checksums of the files that hold a checkpoint's table, and of its config."""
    if not checkpoint.is_dir():
        raise TableRefusedError(f"{checkpoint}: --write is for checkpoints; a flat file has its sidecar")
    sums = {path.name: _file_sum(path) for path in _table_files(checkpoint)}
    manifest = checkpoint / MANIFEST_NAME
    temporary = manifest.with_name(f".{MANIFEST_NAME}.{os.getpid()}.tmp")
    try:
        with temporary.open("x", encoding="utf-8") as file:
            json.dump({"format": _FORMAT, "sha256": sums}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(manifest)
    except OSError as error:
        raise TableRefusedError(f"{manifest}: cannot be written: {error.strerror}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return manifest


def _table_files(checkpoint: Path) -> list[Path]:
    layout = read_checkpoint(checkpoint)
    return [checkpoint / "config.json", *sorted({segment.path for segment in layout.segments})]


def _verify_checkpoint(checkpoint: Path) -> int:
    manifest = checkpoint / MANIFEST_NAME
    if not manifest.is_file():
        raise TableRefusedError(
            f"{checkpoint}: has no {MANIFEST_NAME}; --write makes one of a copy that you trust"
        )
    fields = read_object(manifest)
    recorded = fields.get("sha256")
    if fields.get("format") != _FORMAT or not isinstance(recorded, dict):
        raise TableRefusedError(f"{manifest}: is not a {_FORMAT} manifest")
    files = [checkpoint / str(name) for name in recorded]
    bad = [path.name for path in files if not path.is_file() or _file_sum(path) != recorded[path.name]]
    if bad:
        raise TableRefusedError(f"{checkpoint}: damaged: {', '.join(bad)}; fetch them again")
    unlisted = [path.name for path in _table_files(checkpoint) if path.name not in recorded]
    if unlisted:
        raise TableRefusedError(f"{manifest}: says nothing of {', '.join(unlisted)}")
    return len(files)


def _verify_flat(table: Path) -> int:
    sidecar = read_sidecar(table)
    whole, bad = hashlib.sha256(), []
    with _bar(table, sidecar.layout.size_bytes) as bar, table.open("rb") as file:
        for segment in sidecar.segments:
            part, left = hashlib.sha256(), segment.rows * sidecar.layout.row_bytes
            while left and (chunk := file.read(min(_CHUNK_BYTES, left))):
                part.update(chunk)
                whole.update(chunk)
                bar.update(len(chunk))
                left -= len(chunk)
            if part.hexdigest() != segment.sha256:
                bad.append(segment.source)
    if bad or whole.hexdigest() != sidecar.sha256:
        where = f"in the rows from {', '.join(bad)}" if bad else "as a whole"
        raise TableRefusedError(f"{table}: damaged {where}; build it again")
    return len(sidecar.segments) + 1


def _file_sum(path: Path) -> str:
    digest = hashlib.sha256()
    with _bar(path, path.stat().st_size) as bar, path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            bar.update(len(chunk))
    return digest.hexdigest()


def _bar(path: Path, total_bytes: int) -> "tqdm[NoReturn]":
    return tqdm(total=total_bytes, unit="B", unit_scale=True, desc=path.name)
