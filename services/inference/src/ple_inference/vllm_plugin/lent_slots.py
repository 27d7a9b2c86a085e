"""The slots of a lent region as a CUDA stream uses them."""

from __future__ import annotations

import os

import numpy as np
import torch
from torch import Tensor

from ple_inference.vllm_plugin.native_ring import MISSED, WORDS, Word, ring_word
from ple_inference.vllm_plugin.pinned_region import PinnedRegion
from ple_rpc.session import LentMemory


class Slot:
    """One slot: its ids and rows, its record for `native_ring`, and the event after its last copy."""

    def __init__(self, number: int, region: PinnedRegion, record: np.ndarray, resume_fd: int) -> None:
        self.number = number
        self.record = record
        self.copied = torch.cuda.Event()
        """After the last copy out of the slot."""
        self.count = 0
        shared, layout = region.region, region.region.layout
        self.max_rows = layout.max_rows
        ids_at = layout.slot_offset_bytes(number) + layout.ids_offset_bytes
        self._ids = region.bytes[ids_at : ids_at + 8 * layout.max_rows].view(torch.int64)
        rows_at = shared.rows_offset_bytes(number)
        self._rows = region.bytes[rows_at : rows_at + layout.row_bytes * layout.max_rows]
        self._row_bytes = layout.row_bytes
        self._resume_fd = resume_fd
        self._used = False

    def ask(self, count: int) -> None:
        """Make the record ready for a lookup of `count` ids."""
        self.count = count
        self._used = True
        self.record[Word.RING] = ring_word(self.number, count)
        self.record[Word.SEQUENCE] += 1
        self.record[Word.STATE] = 0

    @property
    def ids(self) -> Tensor:
        """int64 [count] in the region."""
        return self._ids[: self.count]

    @property
    def rows(self) -> Tensor:
        """uint8 [count * row_bytes] in the region."""
        return self._rows[: self.count * self._row_bytes]

    @property
    def is_missed(self) -> bool:
        return int(self.record[Word.STATE]) == MISSED

    @property
    def taken_s(self) -> float:
        """Seconds of this slot's last lookup."""
        return int(self.record[Word.TAKEN_NS]) / 1e9

    def wait(self) -> None:
        """Until the copy out of it has ended."""
        if self._used and not self.copied.query():
            self.copied.synchronize()

    def close(self) -> None:
        """Wait, and let go of what is CUDA's: whoever drops the slot last may be a thread that must not."""
        self.wait()
        del self.copied

    def resume(self) -> None:
        """Rows are there: let the stream go on. The state goes first, as the record is then the stream's."""
        self.record[Word.STATE] = 0
        os.eventfd_write(self._resume_fd, 1)


class LentSlots:
    """All slots of one session. One whose answer was late is never used again: it may still come."""

    def __init__(self, memory: LentMemory, notice_fd: int, timeout_s: float) -> None:
        """Raises RuntimeError when the driver does not register the region."""
        self._memory = memory
        self._region = PinnedRegion(memory.region)
        count = memory.region.layout.slots
        self._records = np.zeros((count, WORDS), np.int64)
        self._resume_fds = [os.eventfd(0, os.EFD_CLOEXEC) for _ in range(count)]
        self._records[:, Word.BELL_FD] = memory.bell_fd
        self._records[:, Word.TIMEOUT_NS] = int(timeout_s * 1e9)
        self._records[:, Word.NOTICE_FD] = notice_fd
        self._records[:, Word.RESUME_FD] = self._resume_fds
        self.slots = [
            Slot(number, self._region, self._records[number], self._resume_fds[number])
            for number in range(count)
        ]
        self._next = 0
        self.given_up: set[int] = set()
        """Numbers of slots that missed an answer."""

    @property
    def region(self) -> object:
        return self._memory.region

    def take(self) -> Slot | None:
        """The slot whose turn it is, once its last copy has ended; None when all have been given up.

        Then so is the session: the next one has slots that can be used.
        """
        for _ in self.slots:
            slot = self.slots[self._next]
            self._next = (self._next + 1) % len(self.slots)
            if slot.number not in self.given_up:
                slot.wait()
                if slot.number not in self.given_up:  # it may have missed its answer while we waited
                    return slot
        self._memory.give_up()
        return None

    def missed(self) -> list[Slot]:
        """Slots that the stream waits at for their rows; they are given up."""
        found = [slot for slot in self.slots if slot.is_missed]
        self.given_up.update(slot.number for slot in found)
        return found

    def close(self) -> None:
        """After waiting for all copies, let region and descriptors go."""
        for slot in self.slots:
            slot.close()
        self._region.close()
        self._memory.close()
        for fd in self._resume_fds:
            os.close(fd)
