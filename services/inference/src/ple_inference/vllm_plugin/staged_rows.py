"""Rows without shared memory: over gRPC into pinned memory, while the step's thread waits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.utils.gpu_sync_debug import gpu_sync_allowed

from ple_inference.vllm_plugin.pinned_region import pinned
from ple_rpc.client import TableClient


class HostIds:
    """Ids off the GPU, in pinned memory that the next fetch overwrites."""

    def __init__(self, max_ids: int) -> None:
        self._ids = pinned(max_ids, torch.int64)
        self._there = torch.cuda.Event()

    def fetch(self, ids: Tensor) -> Any:
        """int64 on the GPU, any shape -> numpy int64, flat. Waits for what the current stream was given."""
        host = self._ids[: ids.numel()]
        host.copy_(ids.view(-1), non_blocking=True)
        self._there.record()
        with gpu_sync_allowed():
            self._there.synchronize()
        return host.numpy()


class StagedRows:
    """One buffer, used again once the copy out of it has ended."""

    def __init__(self, client: TableClient, size_bytes: int) -> None:
        self._client = client
        self._rows = pinned(size_bytes, torch.uint8)
        self._copied = torch.cuda.Event()

    def deliver(self, ids: Any, rows: Tensor) -> None:
        """ids as `HostIds` gives them -> rows on the GPU. Raises a TableError, with `rows` unchanged."""
        with gpu_sync_allowed():
            self._copied.synchronize()
        staging = self._rows[: rows.nbytes]
        self._client.lookup(ids, staging.numpy())
        rows.view(-1).copy_(staging, non_blocking=True)
        self._copied.record()
