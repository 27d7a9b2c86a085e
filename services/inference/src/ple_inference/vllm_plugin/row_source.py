"""A step's rows: ids off the GPU, a lookup in the daemon, rows onto the GPU, on a CUDA stream of their own.

The step's thread only puts the three on that stream and goes on: vLLM prepares the launch of the forward
while ids travel and the daemon reads, and the layers before the PLE layer run meanwhile. The lookup is a host
function in native code (`native_ring.py`).
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm.utils.gpu_sync_debug import gpu_sync_allowed

from ple_inference.garbage import uncollected
from ple_inference.vllm_plugin import native_ring
from ple_inference.vllm_plugin.lent_slots import LentSlots, Slot
from ple_inference.vllm_plugin.pinned_region import launch_host_function
from ple_inference.vllm_plugin.staged_rows import HostIds, StagedRows
from ple_rpc.client import TableClient
from ple_rpc.errors import TableError

_log = logging.getLogger("vllm.triplex")


class RowSource:
    """Delivers rows through the client's shared region or, without one, over gRPC.

    A lookup that misses its answer is repeated by a thread that has the client's patience: reconnects,
    restarts of the daemon, its deadline. Rows that cannot be had for good end the process, by `give_up`:
    the step is on the GPU already, and must not compute with rows that are not there. One thread delivers.
    """

    def __init__(
        self,
        client: TableClient,
        max_ids: int,
        row_bytes: int,
        timeout_s: float,
        rows_there: torch.cuda.Event,
        give_up: Callable[[TableError], None],
    ) -> None:
        """`timeout_s` is how long an answer may take before the client looks after it."""
        self._client = client
        self._max_ids, self._row_bytes = max_ids, row_bytes
        self._timeout_s = timeout_s
        self._rows_there = rows_there
        self._give_up = give_up
        self._stream = torch.cuda.Stream()
        self._slots: LentSlots | None = None
        self._staged: tuple[HostIds, StagedRows] | None = None
        self.deliveries = 0
        self.last_lookup_s = 0.0
        """Of a lookup before the last: from the ring to the answer, as the stream saw it."""
        self._notice_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._is_closed = False
        self._rescuer = threading.Thread(target=self._rescue, name="ple-rescue", daemon=True)
        self._rescuer.start()

    def connect(self) -> None:
        """Register shared memory with CUDA now, not in the first step."""
        self._current_slots()

    def deliver(self, ids: Tensor, rows: Tensor) -> None:
        """ids: int64 on the GPU, any shape -> rows: uint8 on the GPU, contiguous, row_bytes for each id.

        Returns at once. What waits for `rows_there` from now on finds the rows; `ids` must stay until then.
        """
        flat, row_bytes = ids.view(-1), rows.view(-1)
        while flat.numel():
            # A daemon may lend slots that are smaller than a step.
            count = self._deliver_some(flat, row_bytes)
            flat, row_bytes = flat[count:], row_bytes[count * self._row_bytes :]
        self.deliveries += 1

    def _deliver_some(self, ids: Tensor, rows: Tensor) -> int:
        """How many of `ids`, from the first on, were taken care of."""
        slots = self._current_slots()
        with gpu_sync_allowed():
            slot = None if slots is None else slots.take()
        if slot is None:
            self._deliver_staged(ids, rows)
            return ids.numel()
        self.last_lookup_s = slot.taken_s
        count = min(ids.numel(), slot.max_rows)
        self._deliver_beside(slot, ids[:count], rows[: count * self._row_bytes])
        return count

    def close(self) -> None:
        """Wait for what is on the stream, and close the client. Again: nothing."""
        if self._is_closed:
            return
        self._drop_slots()
        self._is_closed = True
        os.eventfd_write(self._notice_fd, 1)
        self._rescuer.join(5)
        os.close(self._notice_fd)
        self._client.close()

    def _deliver_beside(self, slot: Slot, ids: Tensor, rows: Tensor) -> None:
        slot.ask(ids.numel())
        # After the ids, and after the step before has read its rows.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            slot.ids.copy_(ids, non_blocking=True)
            launch_host_function(native_ring.ADDRESS, slot.record.ctypes.data)
            rows.copy_(slot.rows, non_blocking=True)
            slot.copied.record()
            self._rows_there.record()

    def _current_slots(self) -> LentSlots | None:
        """Those of the live session; each new connection to a daemon brings others."""
        if self._slots is not None and self._slots.region is self._client.region:
            return self._slots
        self._drop_slots()
        memory = self._client.lend_memory()
        if memory is not None:
            self._slots = LentSlots(memory, self._notice_fd, self._timeout_s)
        return self._slots

    def _drop_slots(self) -> None:
        if self._slots is not None:
            with gpu_sync_allowed():
                self._slots.close()
            self._slots = None

    # -- rescue, in a thread of its own that must not touch CUDA ---------------------------------------

    def _rescue(self) -> None:
        while True:
            os.eventfd_read(self._notice_fd)
            if self._is_closed:
                return
            # Destroying what is CUDA's may wait for the stream that waits for us, and would wait with the
            # interpreter's lock.
            with uncollected():
                self._fill_missed()

    def _fill_missed(self) -> None:
        slots = self._slots
        if slots is not None:
            for slot in slots.missed():
                self._fill(slot)

    def _fill(self, slot: Slot) -> None:
        """Put a slot's rows into it by an ordinary lookup, and let the stream go on."""
        try:
            self._client.lookup(slot.ids.numpy().copy(), slot.rows.numpy())
        except TableError as error:
            _log.critical("no rows for a step that is on the GPU already, the engine ends: %s", error)
            self._give_up(error)
        except BaseException:
            _log.critical("no rows for a step that is on the GPU already, the engine ends", exc_info=True)
            self._give_up(TableError("unexpected"))
        else:
            slot.resume()

    # -- without shared memory -----------------------------------------------------------------------

    def _deliver_staged(self, ids: Tensor, rows: Tensor) -> None:
        """On the current stream, and this thread waits: what is launched later finds the rows anyway."""
        if self._staged is None:
            size_bytes = self._max_ids * self._row_bytes
            self._staged = HostIds(self._max_ids), StagedRows(self._client, size_bytes)
        host_ids, staged = self._staged
        staged.deliver(host_ids.fetch(ids), rows)


def end_process(error: Any) -> None:  # noqa: ARG001 - the log has it
    """Past every handler: the main thread may wait for the very stream that waits for rows."""
    logging.shutdown()
    os._exit(1)
