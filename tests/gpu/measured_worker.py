"""Counts a worker's GPU memory when its model is loaded, for a --worker-extension-cls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch


def measure(worker: Any) -> None:
    """From vLLM's hook between the device and the model: `worker.loaded_memory` is there when it is loaded.

    The figures that loaded_memory.predict gives for a rank. Not a worker class: the plugin's is looked for.
    """
    load_model: Callable[..., None] = worker.load_model

    def load_and_measure(*args: Any, **kwargs: Any) -> None:
        peaks = Peaks()
        # vLLM forgets the peak when the model is loaded, to measure what it holds.
        with mock.patch.object(torch.cuda, "reset_peak_memory_stats", peaks.keep_and_reset):
            load_model(*args, **kwargs)
        peaks.keep()
        worker.loaded_memory = {
            "allocated_bytes": torch.cuda.memory_allocated(),
            "reserved_bytes": torch.cuda.memory_reserved(),
            "peak_reserved_bytes": peaks.reserved_bytes,
            "peak_allocated_bytes": peaks.allocated_bytes,
        }

    worker.load_model = load_and_measure


class Peaks:
    """The largest of all peaks, however often PyTorch's are reset."""

    def __init__(self) -> None:
        self._reset = torch.cuda.reset_peak_memory_stats
        self.reserved_bytes = self.allocated_bytes = 0

    def keep(self) -> None:
        self.reserved_bytes = max(self.reserved_bytes, torch.cuda.max_memory_reserved())
        self.allocated_bytes = max(self.allocated_bytes, torch.cuda.max_memory_allocated())

    def keep_and_reset(self, device: Any = None) -> None:
        self.keep()
        self._reset(device)
