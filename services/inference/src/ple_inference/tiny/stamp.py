"""The file that says a tiny checkpoint is whole, and what it was made with."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_NAME = "triplex-tiny.json"
# Raised when the same options would give other bytes.
_FORMAT = 1


class OutputExistsError(Exception):
    """The output folder holds something that is not ours to replace."""


def check_replaceable(out: Path) -> None:
    """Raise OutputExistsError unless `out` is missing or an empty folder."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise OutputExistsError(f"{out} is not empty and is no checkpoint with these options; use --force")


def is_complete(out: Path, options: DataclassInstance) -> bool:
    """Whether `out` is a checkpoint made with these options, every file as long as it was written."""
    try:
        stamp = json.loads((out / _NAME).read_text())
        sizes = {name: (out / name).stat().st_size for name in stamp["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return bool(stamp == _content(options, sizes))


def write_stamp(folder: Path, options: DataclassInstance) -> None:
    """Write last: the stamp lists every file that is there."""
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    (folder / _NAME).write_text(json.dumps(_content(options, sizes), indent=1) + "\n")


def _content(options: DataclassInstance, sizes: dict[str, int]) -> dict[str, Any]:
    return {"format": _FORMAT, "options": dataclasses.asdict(options), "files": dict(sorted(sizes.items()))}
