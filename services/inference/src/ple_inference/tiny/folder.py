"""A folder that is there whole or not at all."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from ple_inference.tiny.stamp import check_replaceable

_UNFINISHED = ".unfinished"


@contextmanager
def whole_folder(out: Path, *, force: bool) -> Iterator[Path]:
    """A folder beside `out` to write into; when the body ends without an error it becomes `out`.

    Errors: stamp.OutputExistsError unless `force`, OSError.
    """
    if not force:
        check_replaceable(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with _hidden_folder(out) as building:
        yield building
        _open_to_readers(building)
        if force:
            _replace(building, out)
        else:
            # Only onto what is missing or empty: another writer may have been faster.
            building.rename(out)


def sweep_unfinished(parent: Path) -> None:
    """Remove what writers into `parent` left that were killed. What a living one holds locked stays."""
    for folder in parent.glob(f".*{_UNFINISHED}"):
        with suppress(OSError), _locked(folder) as is_ours:
            if is_ours:
                shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _hidden_folder(out: Path) -> Iterator[Path]:
    """A new folder beside `out`, gone afterwards unless renamed; its lock shows that its owner lives."""
    with ExitStack() as held:
        folder = None
        # A sweep may come between making and locking: another folder then.
        while folder is None or not folder.exists():
            made = Path(tempfile.mkdtemp(prefix=f".{out.name}-", suffix=_UNFINISHED, dir=out.parent))
            with suppress(BlockingIOError, FileNotFoundError):
                held.enter_context(_locked(made))
                folder = made
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Hold a folder; the kernel lets go of it however the process ends. False: this disk has no locks.

    Errors: BlockingIOError when another process holds it, OSError for what is no folder.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        is_held = True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if isinstance(error, BlockingIOError):
                raise
            is_held = False
        yield is_held
    finally:
        os.close(descriptor)


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
    with _hidden_folder(out) as old:
        out.rename(old / out.name)
        building.rename(out)
