"""A worker that counts its GPU memory when its model is loaded: worker_cls measured_worker.MeasuredWorker."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

from ple_inference.vllm_plugin.worker import TriplexWorker


class MeasuredWorker(TriplexWorker):
    def load_model(self, *args: Any, **kwargs: Any) -> None:
        peaks = Peaks()
        # vLLM forgets the peak when the model is loaded, to measure what it holds.
        with mock.patch.object(torch.cuda, "reset_peak_memory_stats", peaks.keep_and_reset):
            super().load_model(*args, **kwargs)
        peaks.keep()
        self.loaded_memory = {
            "allocated_bytes": torch.cuda.memory_allocated(),
            "reserved_bytes": torch.cuda.memory_reserved(),
            "peak_reserved_bytes": peaks.reserved_bytes,
            "peak_allocated_bytes": peaks.allocated_bytes,
        }

    def memory_when_loaded(self) -> dict[str, int]:
        """For `collective_rpc`: the figures that loaded_memory.predict gives for a rank."""
        return self.loaded_memory


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
