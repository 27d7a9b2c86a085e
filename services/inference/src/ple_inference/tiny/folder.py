"""A folder that is there whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ple_inference.tiny.stamp import check_replaceable


@contextmanager
def whole_folder(out: Path, *, force: bool) -> Iterator[Path]:
    """A folder beside `out` to write into; when the body ends without an error it becomes `out`.

    Errors: stamp.OutputExistsError unless `force`, OSError.
    """
    if not force:
        check_replaceable(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        yield building
        _open_to_readers(building)
        if force:
            _replace(building, out)
        else:
            # Only onto what is missing or empty: another writer may have been faster.
            building.rename(out)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")


def sync(paths: Iterable[Path]) -> None:
    """Reach the disk before the rename does: a crash must not leave a stamped checkpoint of zeros."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _open_to_readers(folder: Path) -> None:
    """The daemon may run as another user; mkdtemp and safetensors write for the owner alone."""
    folder.chmod(0o755)
    for path in folder.iterdir():
        path.chmod(0o644)


def _replace(building: Path, out: Path) -> None:
    """Put `building` at `out`; what was there goes only once the new folder stands."""
    if not out.exists():
        building.rename(out)
        return
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-old-", dir=out.parent) as old:
        out.rename(Path(old) / out.name)
        building.rename(out)
