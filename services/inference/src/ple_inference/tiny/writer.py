"""Writes the tiny checkpoint: all of it or nothing, and not again when it is already there."""

from __future__ import annotations

from collections.abc import Callable
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
from ple_inference.tiny.folder import sync, whole_folder, write_json
from ple_inference.tiny.stamp import write_stamp
from ple_inference.tiny.tokenizer import ordinary_tokens, write_tokenizer

STEPS = TABLE_SHARDS + 3
"""How often `write_checkpoint` reports progress."""


def write_checkpoint(
    out: Path, options: TinyOptions, *, force: bool, progress: Callable[[str], object]
) -> None:
    """Build beside `out`, then rename. Errors: stamp.OutputExistsError, OSError, VocabularyError."""
    with whole_folder(out, force=force) as building:
        _write_files(building, options, progress)


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
    write_json(folder / "model.safetensors.index.json", index.as_json())
    write_json(folder / "config.json", model_config(options))
    write_json(folder / "generation_config.json", generation_config(options))
    write_json(folder / "preprocessor_config.json", PREPROCESSOR_CONFIG)
    progress("files")
    write_stamp(folder, options)
    sync(folder.iterdir())


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
