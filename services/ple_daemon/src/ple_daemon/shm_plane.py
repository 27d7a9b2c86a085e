"""The shared-memory plane: seats for sessions' regions, and the two native threads that serve them."""

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable

from ple_daemon.errors import DaemonError
from ple_daemon.gather import Int64Array
from ple_daemon.shm_board import (
    CLOSING,
    FREE,
    LIVE,
    MAX_SEATS,
    QUEUED,
    Board,
    Control,
    Count,
    Job,
    Seat,
)
from ple_daemon.shm_kernels import serve_bells, serve_bulk
from ple_daemon.shm_region import MappedRegion
from ple_daemon.table import Table
from ple_rpc.errors import QuotaExceeded

_log = logging.getLogger(__name__)

_START_S = 120.0  # the kernels may have to be compiled
_LOOK_S = 0.005


class ShmPlane:
    """Owns the threads, the regions' mappings and the doorbell connections that were handed to it.

    A seat that is given up is closed by `collect`, once both threads have let go of it: `notice` is readable
    when there may be something to collect.
    """

    def __init__(self, table: Table) -> None:
        self._table = table
        self._board = Board(table)
        self._wakes = [os.eventfd(0, os.EFD_CLOEXEC) for _ in range(2)]
        self.notice = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        control = self._board.control
        control[[Control.BELL_WAKE_FD, Control.BULK_WAKE_FD, Control.NOTICE_FD]] = [*self._wakes, self.notice]
        self._lock = threading.Lock()
        self._held: dict[int, tuple[MappedRegion, socket.socket]] = {}
        self._doubts = 0
        counts = self._board.counts
        table.counters.rows.include(counts[:, Count.ROWS])
        table.counters.rows_advised.include(counts[:, Count.ADVISED])
        table.counters.read_errors.include(counts[:, Count.READ_ERRORS])
        table.counters.lookups.include(counts[:, Count.OUTCOMES])  # those with rows, as the table counts them
        table.marks.checked.include(counts[:, Count.CHECKED])
        table.marks.cold.include(counts[:, Count.COLD])
        arguments = self._board.address, table.places
        self._threads = [
            threading.Thread(target=serve_bells, args=arguments, name="shm-bells", daemon=True),
            threading.Thread(
                target=serve_bulk, args=(*arguments, table.marks.values), name="shm-bulk", daemon=True
            ),
        ]

    def start(self) -> None:
        """Run the threads; returns when both are in native code. Raises DaemonError when they are not."""
        for thread in self._threads:
            thread.start()
        control = self._board.control
        deadline = time.monotonic() + _START_S
        while not (control[Control.BELLS_RUN] and control[Control.BULK_RUNS]):
            if time.monotonic() > deadline or not all(thread.is_alive() for thread in self._threads):
                raise DaemonError("the shared-memory threads did not start; see the log above")
            time.sleep(_LOOK_S)

    def seat(self, region: MappedRegion, bell: socket.socket) -> None:
        """Serve a region's rings from now on; takes both arguments over. Raises QuotaExceeded."""
        with self._lock:
            seats = self._board.seats
            free = next((i for i in range(MAX_SEATS) if i not in self._held), None)
            if free is None:
                raise QuotaExceeded(f"{MAX_SEATS} shared-memory regions at once")
            layout = region.layout
            seats[free] = 0
            self._board.jobs[free] = 0
            for column, value in (
                (Seat.FD, bell.fileno()), (Seat.REGION, region.address), (Seat.SLOTS, layout.slots),
                (Seat.MAX_ROWS, layout.max_rows), (Seat.SLOT_BYTES, layout.slot_bytes),
                (Seat.IDS_OFFSET, layout.ids_offset_bytes), (Seat.ROWS_OFFSET, layout.rows_offset_bytes),
                (Seat.FIRST_SLOT_OFFSET, layout.slot_offset_bytes(0)),
            ):  # fmt: skip
                seats[free, column] = value
            self._held[free] = region, bell
            self._board.publish(seats[free, Seat.STATE :], LIVE)
        self._wake()

    def give_up(self, region: MappedRegion) -> None:
        """Stop serving a region; it and its connection are closed by `collect`."""
        with self._lock:
            for seat, (held, _) in self._held.items():
                if held is region and self._board.seats[seat, Seat.STATE] == LIVE:
                    self._board.publish(self._board.seats[seat, Seat.STATE :], CLOSING)
        self._wake()

    def collect(self) -> None:
        """Look at what the threads noticed: ended connections, seats let go of, pages in doubt."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.notice)
        self._mend()
        seats = self._board.seats
        for seat, (region, _) in list(self._held.items()):
            if seats[seat, Seat.STATE] == LIVE and seats[seat, Seat.DROPPED]:
                self.give_up(region)
            elif seats[seat, Seat.STATE] == CLOSING and seats[seat, Seat.BULK_GONE]:
                self._close(seat)

    @property
    def regions(self) -> int:
        return len(self._held)

    @property
    def region_bytes(self) -> int:
        """Bytes of clients' memory that is mapped."""
        return sum(region.layout.size_bytes for region, _ in list(self._held.values()))

    @property
    def counts(self) -> Int64Array:
        """int64 [2, Count]: of decode-class and of bulk lookups."""
        return self._board.counts

    def refuse(self) -> None:
        """Answer new rings with UNAVAILABLE from now on."""
        self._board.publish(self._board.control[Control.DRAINING :], 1)

    def drain(self, timeout_s: float) -> bool:
        """Let queued lookups end; False when the timeout came first."""
        return _within(timeout_s, lambda: not (self._board.jobs[:, :, Job.STATE] == QUEUED).any())

    def stop(self, timeout_s: float) -> bool:
        """End the threads, then close everything; False, with all left as it is, when a thread hangs."""
        self._board.publish(self._board.control[Control.STOP :], 1)
        self._wake()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            _log.error("a shared-memory thread hangs in a read")
            return False
        for seat in list(self._held):
            self._close(seat)
        with self._lock:  # sessions may still end, and wake
            wakes, self._wakes = self._wakes, []
        for fd in (*wakes, self.notice):
            os.close(fd)
        return True

    def _mend(self) -> None:
        doubts = int(self._board.control[Control.DOUBTS])
        if doubts != self._doubts:
            self._doubts = doubts
            self._table.repair()
            self._table.watch.check()

    def _close(self, seat: int) -> None:
        with self._lock:
            region, bell = self._held.pop(seat)
            self._board.seats[seat, Seat.STATE] = FREE
            bell.close()
            region.close()

    def _wake(self) -> None:
        with self._lock:
            for fd in self._wakes:
                os.eventfd_write(fd, 1)


def _within(timeout_s: float, condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_S)
    return True
