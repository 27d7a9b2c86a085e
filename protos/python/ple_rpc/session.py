"""A client's session: the Attach stream that is its lease, and the memory that it shares with the daemon."""

import array
import contextlib
import logging
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc

from ple_rpc import bell
from ple_rpc.errors import EXCEPTION_OF_CODE, TableError, TableUnavailable, from_rpc_error
from ple_rpc.shared_region import RegionLayout, SharedRegion
from ple_rpc.table.v1 import table_service_pb2

_log = logging.getLogger(__name__)

_LOOK_S = 0.05
_CODES = {code.value[0]: code for code in grpc.StatusCode}

Events = Iterator[table_service_pb2.AttachResponse]


class Lease:
    """An Attach stream, read by a thread of its own until it ends."""

    def __init__(self, call: Events, timeout_s: float) -> None:
        """Raises a TableError when the daemon gives no session."""
        self._call = call
        self._opened: queue.SimpleQueue[table_service_pb2.SessionOpened | TableError] = queue.SimpleQueue()
        self.ended = threading.Event()
        threading.Thread(target=self._read, name="ple-lease", daemon=True).start()
        try:
            opened = self._opened.get(timeout=timeout_s)
        except queue.Empty:
            opened = TableUnavailable("the daemon did not open a session")
        if isinstance(opened, TableError):
            self.close()
            raise opened
        self.token = opened.session_token
        self.quotas = opened.quotas

    def close(self) -> None:
        self._call.cancel()  # type: ignore[attr-defined]

    def _read(self) -> None:
        try:
            for event in self._call:
                self._hear(event)
            self._opened.put(TableUnavailable("the daemon ended the session"))
        except grpc.RpcError as error:
            self._opened.put(from_rpc_error(error))
        finally:
            self.ended.set()

    def _hear(self, event: table_service_pb2.AttachResponse) -> None:
        kind = event.WhichOneof("event")
        if kind == "opened":
            self._opened.put(event.opened)
        elif kind == "draining":
            _log.info("table daemon drains reason=%s", event.draining.reason)
        elif kind == "degraded":
            _log.warning("table daemon degraded reason=%s", event.degraded.reason)


@dataclass(slots=True)
class Ticket:
    """A lookup on its way in a slot."""

    slot: int
    rows: int
    sequence: int
    status: int | None = None


class SlotRows:
    """Rows that lie in the region: read `rows`, or copy from `offset_bytes` of `region`, then `release`."""

    def __init__(self, memory: "SharedMemory", ticket: Ticket) -> None:
        self._memory, self._ticket = memory, ticket
        self.region = memory.region
        self.offset_bytes = memory.region.rows_offset_bytes(ticket.slot)
        self.rows = memory.region.rows(ticket.slot, ticket.rows)

    def release(self) -> None:
        """Give the slot back: its rows may be overwritten from now on."""
        self.rows.release()
        self._memory.give_back(self._ticket)


class LentMemory:
    """A region and its doorbell in the hands of native code: slots and sequences are the borrower's business.

    Sequences start at 1 for each slot and grow. The descriptor is the borrower's own: what the client closes
    meanwhile ends the connection, and never leads to another file.
    """

    def __init__(self, region: SharedRegion, bell_fd: int, give_up: Callable[[], None]) -> None:
        self.region = region
        self.bell_fd = bell_fd
        self.give_up = give_up
        """Call it when no slot can be used any more: the client's next call begins a new session."""

    def close(self) -> None:
        os.close(self.bell_fd)


class SharedMemory:
    """The region of one session and the doorbell that goes with it. Thread-safe.

    Threads that wait take turns in listening: whoever listens also notes the answers of the others. A slot
    whose answer did not come in time is never used again, so that a late one cannot pass for another's rows.
    """

    def __init__(
        self, path: Path, lease: Lease, layout: RegionLayout, fingerprint: bytes, timeout_s: float
    ) -> None:
        """Raises OSError when there is no memory or no doorbell, TableError when the daemon refuses."""
        self.region = SharedRegion(layout, fingerprint)
        self._lease = lease
        self._lock = threading.Lock()  # entered by itself, which is cheaper than through the condition
        self._turns = threading.Condition(self._lock)
        self._listening = False
        self._free = list(range(layout.slots))
        self._tickets: dict[int, Ticket] = {}
        self._sequence = 0
        self._broken = False
        self.is_lent = False
        """Whether somebody else rings: then no lookup of this client may."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._greet(path, timeout_s)
        except BaseException:
            self.close()
            raise

    @property
    def is_lost(self) -> bool:
        """No lookup can succeed any more: the connection or the lease has ended, or no slot is left."""
        return self._broken or self._lease.ended.is_set() or not (self._free or self._tickets)

    def lend(self) -> LentMemory:
        """Hand the region over, for the session's life. No lookup may be under way. Raises ValueError."""
        with self._lock:
            if self.is_lent or self._tickets:
                raise ValueError("the region is in use")
            self.is_lent = True
            return LentMemory(self.region, os.dup(self._socket.fileno()), self.give_up)

    def ring(self, ids: memoryview, deadline: float) -> Ticket:
        """Send a lookup of int64 ids, at most `layout.max_rows`. Raises TableUnavailable."""
        rows = ids.nbytes // 8
        ticket = self._take_slot(rows, deadline)
        self.region.ids(ticket.slot, rows)[:] = ids
        try:
            self._socket.send(bell.RING.pack(ticket.slot, rows, ticket.sequence), socket.MSG_DONTWAIT)
        except OSError as error:
            raise self._lose(error) from error
        return ticket

    def wait(self, ticket: Ticket, timeout_s: float) -> bool:
        """Whether the answer has come. Raises what it says, TableUnavailable when none can come any more."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            while ticket.status is None:
                # Listening comes first: most answers are on their way already.
                if self._listening:
                    self._turns.wait(_LOOK_S)
                else:
                    self._listen()
                if ticket.status is None:
                    if self.is_lost:
                        raise TableUnavailable("the daemon closed the doorbell", sent=True)
                    if time.monotonic() > deadline:
                        return False
        if ticket.status:
            self._raise(ticket)
        return True

    def give_back(self, ticket: Ticket) -> None:
        """The slot of an answered ticket may be used again."""
        with self._lock:
            if self._tickets.get(ticket.slot) is ticket:
                del self._tickets[ticket.slot]
                self._free.append(ticket.slot)
                self._turns.notify_all()

    def quarantine(self, ticket: Ticket) -> None:
        """Nobody waits for this ticket any more: its slot stays out of use."""
        with self._lock:
            self._tickets.pop(ticket.slot, None)

    def close(self) -> None:
        """End the connection. Threads that wait find out."""
        self.give_up()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that listens
        self._socket.close()
        self.region.close()

    def give_up(self) -> None:
        """The daemon does not answer: no lookup of this session is worth waiting for."""
        self._broken = True

    def _greet(self, path: Path, timeout_s: float) -> None:
        self._socket.settimeout(timeout_s)
        self._socket.connect(str(path))
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [self.region.fd]))]
        self._socket.sendmsg([bell.greeting(self._lease.token)], rights)
        try:
            status, reason = bell.parse_welcome(self._socket.recv(bell.MAX_WELCOME_BYTES))
        except ValueError as error:
            raise TableUnavailable(f"the doorbell at {path} was closed: {error}") from error
        if status:
            raise _exception(status, reason)
        # One system call for each wait, where a timeout of Python's would be two.
        self._socket.settimeout(None)
        timeval = struct.pack("ll", int(_LOOK_S), int(_LOOK_S % 1 * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)

    def _take_slot(self, rows: int, deadline: float) -> Ticket:
        with self._lock:
            while not self._free:
                if self.is_lost:
                    raise TableUnavailable("no slot of the region can be used any more")
                if time.monotonic() > deadline:
                    raise TableUnavailable("all slots of the region are in use")
                self._turns.wait(_LOOK_S)
            self._sequence += 1
            ticket = Ticket(self._free.pop(), rows, self._sequence)
            self._tickets[ticket.slot] = ticket
            return ticket

    def _listen(self) -> None:
        """Receive one answer or none, with the lock held but for the wait itself."""
        self._listening = True
        self._lock.release()
        try:
            message = self._socket.recv(bell.RING_BYTES + 1)
        except (BlockingIOError, InterruptedError):
            message = None
        except OSError as error:
            raise self._lose(error) from error
        finally:
            self._lock.acquire()
            self._listening = False
        if message is not None:
            self._note(message)
        self._turns.notify_all()

    def _note(self, message: bytes) -> None:
        if len(message) != bell.RING_BYTES:
            self._broken = True
            return
        slot, status, sequence = bell.ANSWER.unpack(message)
        ticket = self._tickets.get(slot)
        if ticket is not None and ticket.sequence == sequence:
            ticket.status = status

    def _raise(self, ticket: Ticket) -> None:
        status, detail = ticket.status or 0, self.region.head(ticket.slot)[2]
        self.give_back(ticket)
        code = _CODES.get(status, grpc.StatusCode.UNKNOWN)
        about = (
            f" (row {detail})" if code in (grpc.StatusCode.OUT_OF_RANGE, grpc.StatusCode.DATA_LOSS) else ""
        )
        raise _exception(status, f"{code.name.lower()}: a lookup of {ticket.rows} rows{about}")

    def _lose(self, error: OSError) -> TableUnavailable:
        self._broken = True
        return TableUnavailable(f"the doorbell broke: {error}", sent=True)


class Session:
    """A lease, with shared memory where that can be had."""

    def __init__(self, lease: Lease, memory: SharedMemory | None) -> None:
        self.lease = lease
        self.memory = memory

    @property
    def is_lost(self) -> bool:
        return self.lease.ended.is_set() if self.memory is None else self.memory.is_lost

    def close(self) -> None:
        if self.memory is not None:
            self.memory.close()
        self.lease.close()


def open_memory(
    paths: list[Path], lease: Lease, layout: RegionLayout, fingerprint: bytes, timeout_s: float
) -> SharedMemory | None:
    """Shared memory through the first doorbell that answers, or None: then rows come over gRPC."""
    for path in paths:
        try:
            return SharedMemory(path, lease, layout, fingerprint, timeout_s)
        except (OSError, AttributeError, TableError) as error:  # AttributeError: no memfd on this system
            _log.info("no shared memory through %s: %s", path, error)
    return None


def _exception(status: int, text: str) -> TableError:
    code = _CODES.get(status)
    kind: Callable[[str], TableError] = (
        EXCEPTION_OF_CODE.get(code, TableUnavailable) if code else TableUnavailable
    )
    if kind is TableUnavailable:
        return TableUnavailable(text, sent=True)
    return kind(text)
