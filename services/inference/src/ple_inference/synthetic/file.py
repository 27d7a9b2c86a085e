"""One safetensors file whose tensors are written in pieces, in any order, by any thread."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from ple_inference.synthetic.layout import Spec

_NAMES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int32: "I32",
    torch.int64: "I64",
}


class PiecewiseFile:
    """Made at its full length, with its header; use as a context manager."""

    def __init__(self, path: Path, specs: Sequence[Spec]) -> None:
        # The widest first: every tensor is then aligned to its type.
        ordered = sorted(specs, key=lambda spec: -spec.dtype.itemsize)
        offset_bytes = 0
        self._offsets: dict[str, int] = {}
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        for spec in ordered:
            self._offsets[spec.name] = offset_bytes
            end_bytes = offset_bytes + spec.size_bytes
            header[spec.name] = {
                "dtype": _NAMES[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [offset_bytes, end_bytes],
            }
            offset_bytes = end_bytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._start_bytes = 8 + len(text)
        self._descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        try:
            os.ftruncate(self._descriptor, self._start_bytes + offset_bytes)
            self._write(len(text).to_bytes(8, "little") + text, 0)
        except OSError:
            os.close(self._descriptor)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def write_rows(self, spec: Spec, first: int, rows: Tensor) -> None:
        """Put `rows` [count, columns] at row `first` of its tensor. Raises OSError."""
        content = rows.contiguous().view(torch.uint8).numpy().data.cast("B")
        self._write(content, self._start_bytes + self._offsets[spec.name] + first * spec.row_bytes)

    def sync(self) -> None:
        """Return when the file is on the disk. Raises OSError."""
        os.fsync(self._descriptor)

    def _write(self, content: bytes | memoryview, offset_bytes: int) -> None:
        left = memoryview(content)
        while left:
            written = os.pwrite(self._descriptor, left, offset_bytes)
            left, offset_bytes = left[written:], offset_bytes + written
