"""A step's rows: ids off the GPU, a lookup in the daemon, rows onto the GPU.

`stream_rows.py` does the same without the step's thread.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch
from torch import Tensor
from vllm.utils.gpu_sync_debug import gpu_sync_allowed

from ple_inference.vllm_plugin.pinned_region import PinnedRegion
from ple_inference.vllm_plugin.staged_rows import HostIds, StagedRows
from ple_rpc.client import TableClient
from ple_rpc.errors import NotOffered
from ple_rpc.session import SlotRows


class RowSource:
    """Delivers rows through the client's shared region, or, where there is none, over gRPC.

    Copies run on the current stream: what the forward reads there is complete. A slot is given back when its
    copy has ended. Used by one thread.
    """

    def __init__(self, client: TableClient, max_ids: int, row_bytes: int, slots: int) -> None:
        self._client = client
        self._ids = HostIds(max_ids)
        self._max_bytes = max_ids * row_bytes
        self._region: PinnedRegion | None = None
        # One slot stays free, so that a lookup never waits for a copy of the step before.
        self._max_copies = slots - 1
        self._copies: deque[tuple[SlotRows, torch.cuda.Event]] = deque()
        self._staged: StagedRows | None = None
        self.deliveries = 0
        self.last_lookup_s = 0.0
        """Of the last lookup through shared memory, copies not counted."""

    def deliver(self, ids: Tensor, rows: Tensor) -> None:
        """ids: int64 on the GPU, any shape -> rows: uint8 on the GPU, contiguous, row_bytes for each id.

        Waits for the ids, so for all that the current stream has been given before. Raises a TableError, with
        `rows` unchanged, when the daemon has not answered by the client's deadline.
        """
        self._release(self._max_copies - 1)
        host = self._ids.fetch(ids)
        start_s = time.perf_counter()
        try:
            slot = self._client.lookup_into_slot(host)
        except NotOffered:
            self._deliver_staged(host, rows)
        else:
            self.last_lookup_s = time.perf_counter() - start_s
            self._copy(slot, rows)
        self.deliveries += 1

    def close(self) -> None:
        """Wait for copies and close the client."""
        self._release(keep=0)
        if self._region is not None:
            self._region.close()
            self._region = None
        self._client.close()

    def _copy(self, slot: SlotRows, rows: Tensor) -> None:
        region = self._registered(slot)
        source = region.bytes[slot.offset_bytes : slot.offset_bytes + rows.nbytes]
        rows.view(-1).copy_(source, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        self._copies.append((slot, copied))

    def _registered(self, slot: SlotRows) -> PinnedRegion:
        """The slot's region, known to CUDA; each new connection to a daemon brings another one."""
        if self._region is None or self._region.region is not slot.region:
            self._release(keep=0)
            if self._region is not None:
                self._region.close()
            self._region = PinnedRegion(slot.region)
        return self._region

    def _release(self, keep: int) -> None:
        """Give slots back whose copy has ended; wait for the oldest while more than `keep` are under way."""
        while self._copies:
            slot, copied = self._copies[0]
            if len(self._copies) > keep and not copied.query():
                with gpu_sync_allowed():
                    copied.synchronize()
            elif not copied.query():
                return
            slot.release()
            self._copies.popleft()

    def _deliver_staged(self, ids: Any, rows: Tensor) -> None:
        if self._staged is None:
            self._staged = StagedRows(self._client, self._max_bytes)
        self._staged.deliver(ids, rows)
