"""The live connection of a client: made when needed, replaced when it breaks, hangs or drains."""

import logging
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import grpc

from ple_rpc.connection import Connection, open_connection, remaining_s
from ple_rpc.errors import LookupCancelled, TableError, TableUnavailable
from ple_rpc.options import ClientOptions
from ple_rpc.session import Session, open_memory
from ple_rpc.shared_region import RegionLayout
from ple_rpc.stats import StatsRecorder
from ple_rpc.table.v1 import table_pb2, table_service_pb2

_log = logging.getLogger(__name__)

T = TypeVar("T")
Cancelled = Callable[[], bool] | None


class Link:
    """One address, at most one connection at a time. Thread-safe.

    The first connection pins the table's fingerprint: a daemon that comes back with another table raises
    TableChanged.
    """

    def __init__(
        self,
        address: str,
        options: ClientOptions,
        recorder: StatsRecorder,
        credentials: grpc.ChannelCredentials | None,
    ) -> None:
        self.address = address
        self._credentials = credentials
        self.live: Connection | None = None
        self.described: table_service_pb2.DescribeResponse | None = None
        self._options = options
        self._recorder = recorder
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def until_ready(self, deadline_s: float, on_wait: Callable[[str], None] | None) -> None:
        """Connect; `on_wait` hears each reason to wait on. Raises TableUnavailable at the deadline."""
        deadline = time.monotonic() + deadline_s
        backoff = _Backoff(self._options)
        while True:
            try:
                self._connect(deadline)
            except TableUnavailable as error:
                if self.is_closed:
                    raise
                if remaining_s(deadline) == 0:
                    raise TableUnavailable(
                        f"no answer from {self.address} in {deadline_s:g} s ({error})"
                    ) from error
                if on_wait is not None:
                    on_wait(str(error))
                self._pause(backoff, deadline)
            else:
                return

    def until_answered(self, send: Callable[[Connection, "Patience"], T], cancelled: Cancelled) -> T:
        """The first answer that `send` gets, on as many connections as it takes.

        Raises TableUnavailable at the deadline of a lookup, LookupCancelled, and what no repetition mends.
        """
        options = self._options
        patience = Patience(self, time.monotonic() + options.lookup_deadline_s, cancelled)
        backoff: _Backoff | None = None  # most lookups need none
        while True:
            connection = None
            try:
                connection = self._connect(patience.deadline)
                return _sent(send, connection, patience)
            except TableUnavailable as error:
                self._recorder.wait_began()
                if patience.is_cancelled:
                    raise LookupCancelled("the caller gave the lookup up") from error
                if patience.is_over:
                    raise TableUnavailable(
                        f"no rows from {self.address} in {options.lookup_deadline_s:g} s ({error})"
                    ) from error
                if error.sent and connection is not None:
                    self._recorder.add(lookups_repeated=1)
                if connection is not None and not connection.is_lost and self.answers(connection):
                    # A slow or draining peer, not a dead one: what it has read so far stays cached.
                    patience.attempt_s *= 2
                else:
                    patience.attempt_s = options.hang_check_s
                    self._drop(connection)
                backoff = backoff or _Backoff(options)
                self._pause(backoff, patience.deadline)

    def answers(self, connection: Connection) -> bool:
        """Whether the peer of a lookup that failed still answers Describe."""
        try:
            connection.describe(min(self._options.call_deadline_s, self._options.hang_check_s))
        except (TableError, ValueError):
            return False
        return True

    def close(self) -> None:
        """End the connection; lookups that wait raise TableUnavailable."""
        self._closed.set()
        with self._lock:
            if self.live is not None:
                self.live.close()
            self.live = None

    @property
    def is_closed(self) -> bool:
        return self._closed.is_set()

    @property
    def hang_check_s(self) -> float:
        return self._options.hang_check_s

    def wait_began(self) -> None:
        """This thread's lookup takes longer than a lookup should."""
        self._recorder.wait_began()

    def connect(self, deadline_s: float) -> Connection:
        """The live connection, or a new one. Raises TableUnavailable at the deadline."""
        self.until_ready(deadline_s, None)
        return self._connect(time.monotonic() + deadline_s)

    def _connect(self, deadline: float) -> Connection:
        """The live connection, or a new one. One thread connects, the others wait for it."""
        live = self.live
        if live is not None and not live.is_lost:
            return live
        with self._lock:
            if self._closed.is_set():
                raise TableUnavailable("the client is closed")
            if self.live is not None and not self.live.is_lost:
                return self.live
            if self.live is not None:
                _log.warning("table daemon ended the session address=%s", self.address)
                self.live.close()
                self.live = None
            fingerprint = None if self.described is None else self.described.fingerprint
            timeout_s = min(self._options.call_deadline_s, remaining_s(deadline))
            connection, described = open_connection(self.address, fingerprint, timeout_s, self._credentials)
            try:
                connection.session = self._attach(connection, described, timeout_s)
            except BaseException:
                connection.close()
                raise
            self._adopt(connection, described)
            return connection

    def _adopt(self, connection: Connection, described: table_service_pb2.DescribeResponse) -> None:
        if self.described is not None:
            self._recorder.add(reconnects=1)
            _log.warning(
                "table daemon connected again address=%s instance=%s",
                self.address,
                described.instance_id.hex(),
            )
        self.live, self.described = connection, described

    def _attach(
        self, connection: Connection, described: table_service_pb2.DescribeResponse, timeout_s: float
    ) -> Session | None:
        """A session, with shared memory where that can be had; None where the daemon has no room for one."""
        request = table_service_pb2.AttachRequest(
            client_name=self._options.client_name, expected_fingerprint=described.fingerprint
        )
        try:
            lease = connection.attach(request, timeout_s)
        except TableUnavailable:
            raise
        except TableError as error:
            _log.info("no session with the table daemon: %s", error)
            return None
        layout = _region_layout(self._options, lease.quotas, described.table.row_bytes)
        if layout is None or not described.doorbell_path:
            return Session(lease, None)
        paths = _doorbell_paths(self.address, described.doorbell_path)
        return Session(lease, open_memory(paths, lease, layout, described.fingerprint, timeout_s))

    def _drop(self, connection: Connection | None) -> None:
        """Close a connection that failed, unless another thread already replaced it."""
        with self._lock:
            if connection is None or self.live is not connection:
                return
            self.live = None
            _log.warning("table daemon lost address=%s", self.address)
        connection.close()

    def _pause(self, backoff: "_Backoff", deadline: float) -> None:
        self._closed.wait(min(backoff.next_s(), remaining_s(deadline)))


class Patience:
    """How long a lookup goes on, and how long one try of it."""

    def __init__(self, link: Link, deadline: float, cancelled: Cancelled) -> None:
        self.deadline = deadline
        self.attempt_s = link.hang_check_s
        self._link = link
        self._cancelled = cancelled

    @property
    def try_s(self) -> float:
        return min(self.attempt_s, remaining_s(self.deadline))

    @property
    def is_cancelled(self) -> bool:
        return self._cancelled is not None and self._cancelled()

    @property
    def is_over(self) -> bool:
        return remaining_s(self.deadline) == 0 or self._link.is_closed

    def is_worth_more(self, connection: Connection) -> bool:
        """Whether to wait on for an answer that is late: the peer lives and somebody still wants the rows."""
        self._link.wait_began()
        if self.is_cancelled or self.is_over or not self._link.answers(connection):
            return False
        self.attempt_s *= 2
        return True


class _Backoff:
    """Exponential, with jitter so that several clients do not return in step."""

    def __init__(self, options: ClientOptions) -> None:
        self._next_s = options.backoff_min_s
        self._max_s = options.backoff_max_s

    def next_s(self) -> float:
        delay_s = self._next_s * random.uniform(0.5, 1.0)  # noqa: S311 - not a secret
        self._next_s = min(self._next_s * 2, self._max_s)
        return delay_s


def _sent(send: Callable[[Connection, Patience], T], connection: Connection, patience: Patience) -> T:
    try:
        return send(connection, patience)
    except ValueError as error:  # another thread closed the channel or the region
        raise TableUnavailable(f"connection closed: {error}") from error


def _region_layout(options: ClientOptions, quotas: table_pb2.Limits, row_bytes: int) -> RegionLayout | None:
    """What the client wants, as far as the daemon lets it; None without shared memory."""
    slots = min(options.slots, quotas.max_slots)
    layout = RegionLayout(slots, min(options.max_rows_per_slot, quotas.max_rows_per_slot), row_bytes)
    is_allowed = slots > 0 and layout.max_rows > 0 and layout.size_bytes <= quotas.max_region_bytes
    return layout if is_allowed else None


def _doorbell_paths(address: str, described: str) -> list[Path]:
    """Where the doorbell can be: beside our own socket (folders are mounted anywhere), or as described."""
    named = Path(described)
    if address.startswith("unix:"):
        beside = Path(address.removeprefix("unix:").removeprefix("//")).parent / named.name
        return [beside] if beside == named else [beside, named]
    return [named]
