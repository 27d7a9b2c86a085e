"""Writes a synthetic checkpoint file by file, in bounded memory: all of it or nothing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ple_inference.synthetic.config import model_config
from ple_inference.synthetic.draw import block_bounds, generator
from ple_inference.synthetic.file import PiecewiseFile
from ple_inference.synthetic.layout import Spec, quantization_of
from ple_inference.synthetic.options import SyntheticOptions
from ple_inference.tiny.config import PREPROCESSOR_CONFIG, TinyOptions, generation_config
from ple_inference.tiny.folder import sync, whole_folder, write_json
from ple_inference.tiny.stamp import write_stamp
from ple_inference.tiny.tokenizer import ordinary_tokens, write_tokenizer

MAX_THREADS = 16
"""Each needs up to 100 MB: what is drawn, and what packing makes of it."""
# Headers, tokenizer and JSON files.
_REST_BYTES = 128 * 2**20


class NoRoomError(Exception):
    """The disk is too small; one line."""


def size_bytes(grouped: list[list[Spec]]) -> int:
    """Of all tensors."""
    return sum(spec.size_bytes for specs in grouped for spec in specs)


def write_checkpoint(
    out: Path,
    options: SyntheticOptions,
    grouped: list[list[Spec]],
    *,
    force: bool,
    progress: Callable[[int], object],
) -> None:
    """Write `layout.files(options)`; `progress` is told of bytes.

    Errors: NoRoomError, stamp.OutputExistsError, OSError, VocabularyError.
    """
    _check_room(out, size_bytes(grouped))
    with whole_folder(out, force=force) as folder:
        write_weights(folder, options, grouped, progress=progress)
        _write_texts(folder, options, [spec for specs in grouped for spec in specs])
        write_stamp(folder, options)
        sync(path for path in folder.iterdir() if path.suffix != ".safetensors")


def _check_room(out: Path, needed_bytes: int) -> None:
    place = next(folder for folder in (out, *out.parents) if folder.is_dir())
    free_bytes = shutil.disk_usage(place).free
    if free_bytes < needed_bytes + _REST_BYTES:
        raise NoRoomError(
            f"{out} takes {needed_bytes / 2**30:.1f} GiB and {place} has {free_bytes / 2**30:.1f} GiB free; "
            "choose another folder, or fewer --layers, --experts or table rows"
        )


def write_weights(
    folder: Path, options: SyntheticOptions, grouped: list[list[Spec]], *, progress: Callable[[int], object]
) -> None:
    """Write the safetensors files and their index, and nothing else. Raises OSError."""
    weight_map: dict[str, str] = {}
    threads = min(MAX_THREADS, len(os.sched_getaffinity(0)))
    # One thread of torch's in each of ours. The disk takes one file while the next is drawn.
    drawing = ThreadPoolExecutor(threads, initializer=partial(torch.set_num_threads, 1))
    with ExitStack() as opened, ThreadPoolExecutor(1) as syncing, drawing:
        synced = []
        for number, specs in enumerate(grouped, 1):
            name = f"model-{number:05d}-of-{len(grouped):05d}.safetensors"
            file = opened.enter_context(PiecewiseFile(folder / name, specs))
            _write_file(file, specs, options.seed, drawing, progress)
            synced.append(syncing.submit(file.sync))
            weight_map |= dict.fromkeys((spec.name for spec in specs), name)
        for sync_of_file in synced:
            sync_of_file.result()
    index = {"metadata": {"total_size": size_bytes(grouped)}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(folder / "model.safetensors.index.json", index)


def _write_file(
    file: PiecewiseFile, specs: list[Spec], seed: int, pool: Executor, progress: Callable[[int], object]
) -> None:
    def write(spec: Spec, first: int, count: int) -> int:
        rows = spec.draw.rows(generator(spec.name, first, seed), first, count, spec.columns)
        file.write_rows(spec, first, rows)
        return rows.nbytes

    writes = [
        pool.submit(write, spec, first, count)
        for spec in specs
        for first, count in block_bounds(spec.rows, spec.row_bytes)
    ]
    try:
        for block in writes:
            progress(block.result())
    finally:
        # After an error: nobody writes any more when the file is closed.
        for block in writes:
            block.cancel()
        wait(writes)


def _write_texts(folder: Path, options: SyntheticOptions, specs: list[Spec]) -> None:
    config: dict[str, Any] = model_config(options) | quantization_of(options, specs)
    write_json(folder / "config.json", config)
    vocabulary = TinyOptions(vocab=options.vocab)
    write_json(folder / "generation_config.json", generation_config(vocabulary))
    if options.images:
        write_tokenizer(vocabulary, ordinary_tokens(vocabulary), folder)
        write_json(folder / "preprocessor_config.json", PREPROCESSOR_CONFIG)
