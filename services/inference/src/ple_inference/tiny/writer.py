"""Writes the tiny checkpoint: all of it or nothing, and not again when it is already there."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from ple_inference.tiny import weights
from ple_inference.tiny.config import (
    PREPROCESSOR_CONFIG,
    TABLE_SHARDS,
    TinyOptions,
    generation_config,
    model_config,
)
from ple_inference.tiny.stamp import check_replaceable, write_stamp
from ple_inference.tiny.tokenizer import ordinary_tokens, write_tokenizer

STEPS = TABLE_SHARDS + 3
"""How often `write_checkpoint` reports progress."""


def write_checkpoint(
    out: Path, options: TinyOptions, *, force: bool, progress: Callable[[str], object]
) -> None:
    """Build beside `out`, then rename. Errors: stamp.OutputExistsError, OSError, VocabularyError."""
    if not force:
        check_replaceable(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        _write_files(building, options, progress)
        _open_to_readers(building)
        _replace(building, out)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _write_files(folder: Path, options: TinyOptions, progress: Callable[[str], object]) -> None:
    progress("tokenizer")
    ranks = ordinary_tokens(options)
    write_tokenizer(options, ranks, folder)
    progress("weights")
    body = dict(weights.body_tensors(options, ranks))
    names = sorted(body)
    # The draft module's tensors are spread over the body's files, as in the release.
    parts: list[dict[str, Tensor]] = [{name: body[name] for name in names[place::3]} for place in range(3)]
    index = _TensorIndex(folder, files=len(parts) + TABLE_SHARDS)
    for part in parts:
        index.add(part)
    for name, shard in weights.table_shards(options):
        progress("table")
        index.add({name: shard})
    _write_json(folder / "model.safetensors.index.json", index.as_json())
    _write_json(folder / "config.json", model_config(options))
    _write_json(folder / "generation_config.json", generation_config(options))
    _write_json(folder / "preprocessor_config.json", PREPROCESSOR_CONFIG)
    progress("files")
    write_stamp(folder, options)
    _sync(folder.iterdir())


class _TensorIndex:
    """The safetensors files of one checkpoint, and which tensor lies in which."""

    def __init__(self, folder: Path, files: int) -> None:
        self._folder, self._files = folder, files
        self._weight_map: dict[str, str] = {}
        self._written = self._total_bytes = 0

    def add(self, tensors: dict[str, Tensor]) -> None:
        self._written += 1
        name = f"model-{self._written:05d}-of-{self._files:05d}.safetensors"
        save_file(tensors, self._folder / name, metadata={"format": "pt"})
        self._weight_map |= dict.fromkeys(tensors, name)
        self._total_bytes += sum(tensor.nbytes for tensor in tensors.values())

    def as_json(self) -> dict[str, Any]:
        weight_map = dict(sorted(self._weight_map.items()))
        return {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")


def _open_to_readers(folder: Path) -> None:
    """The daemon may run as another user; mkdtemp and safetensors write for the owner alone."""
    folder.chmod(0o755)
    for path in folder.iterdir():
        path.chmod(0o644)


def _sync(paths: Iterable[Path]) -> None:
    """Reach the disk before the rename does: a crash must not leave a stamped checkpoint of zeros."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _replace(building: Path, out: Path) -> None:
    """Put `building` at `out`; what was there goes only once the new folder stands."""
    if not out.exists():
        building.rename(out)
        return
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-old-", dir=out.parent) as old:
        out.rename(Path(old) / out.name)
        building.rename(out)
