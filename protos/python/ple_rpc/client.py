"""The typed client of the PLE daemon: rows by id or by token, across restarts of the daemon."""

import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import grpc

from ple_rpc.connection import TLS_SCHEME, Connection, open_connection, remaining_s
from ple_rpc.errors import LookupCancelled, TableError, TableUnavailable
from ple_rpc.packing import row_ids_le64, tokens_le32
from ple_rpc.prefetch import PrefetchSender
from ple_rpc.stats import ClientStats, StatsRecorder
from ple_rpc.table.v1 import table_pb2, table_service_pb2

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ClientOptions:
    """Deadlines and bounds, each longer than the ones inside it."""

    lookup_deadline_s: float = 60.0
    """How long a lookup goes on, restarts of the daemon included, before TableUnavailable."""
    hang_check_s: float = 1.0
    """A lookup that takes longer is tried again with twice the time, once Describe shows a living peer;
    a peer that does not answer Describe either is taken for hung and the connection is made anew."""
    call_deadline_s: float = 2.0
    """Describe, Prefetch, CancelPrefetch, Stats."""
    backoff_min_s: float = 0.02
    backoff_max_s: float = 0.5
    prefetch_queue_limit: int = 64

    def __post_init__(self) -> None:
        if not 0 < self.hang_check_s < self.lookup_deadline_s:
            raise ValueError(
                f"hang_check_s {self.hang_check_s} must lie between 0 and "
                f"lookup_deadline_s {self.lookup_deadline_s}"
            )
        if not 0 < self.backoff_min_s <= self.backoff_max_s:
            raise ValueError("backoff_min_s must be positive and at most backoff_max_s")


class TableClient:
    """Reads rows of one table. Thread-safe; nothing is opened before the first call.

    The first connection pins the table's fingerprint, and every lookup carries it: a daemon that comes
    back with another table answers TableChanged, never rows of the wrong table.
    """

    def __init__(
        self,
        address: str,
        options: ClientOptions | None = None,
        *,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        """`address` is unix:PATH, or HOST:PORT (also tls://HOST:PORT) with `ple_rpc.tls.client_credentials`.

        Raises ValueError for a tls:// address without credentials.
        """
        if credentials is None and address.startswith(TLS_SCHEME):
            raise ValueError(f"{address} needs credentials: see ple_rpc.tls.client_credentials")
        self.address = address
        self._credentials = credentials
        self._options = options or ClientOptions()
        self._recorder = StatsRecorder()
        self._lock = threading.Lock()
        self._live: Connection | None = None
        self._described: table_service_pb2.DescribeResponse | None = None
        self._closed = threading.Event()
        self._sender = PrefetchSender(
            lambda: self._live,
            self._recorder,
            queue_limit=self._options.prefetch_queue_limit,
            call_deadline_s=self._options.call_deadline_s,
        )

    # -- what the table is ---------------------------------------------------------------------------

    def wait_ready(
        self, deadline_s: float, on_wait: Callable[[str], None] | None = None
    ) -> table_service_pb2.DescribeResponse:
        """Wait for the daemon; `on_wait` hears each reason to wait on.

        Raises TableUnavailable at the deadline, and at once what no waiting mends.
        """
        deadline = time.monotonic() + deadline_s
        backoff = _Backoff(self._options)
        while True:
            try:
                self._connect(deadline)
                return self._describe_known()
            except TableUnavailable as error:
                if self._closed.is_set():
                    raise
                if remaining_s(deadline) == 0:
                    raise TableUnavailable(
                        f"no answer from {self.address} in {deadline_s:g} s ({error})"
                    ) from error
                if on_wait is not None:
                    on_wait(str(error))
                self._pause(backoff, deadline)

    @property
    def described(self) -> table_service_pb2.DescribeResponse:
        """The newest answer to Describe. Connects when nothing is known yet; raises TableError."""
        if self._described is None:
            self.wait_ready(self._options.lookup_deadline_s)
        return self._describe_known()

    @property
    def description(self) -> table_pb2.TableDescription:
        """What the table is: row type, width, rows, hash constants."""
        return self.described.table

    @property
    def stats(self) -> ClientStats:
        return self._recorder.snapshot()

    # -- rows ----------------------------------------------------------------------------------------

    def lookup_rows(self, row_ids: Sequence[int], *, cancelled: Callable[[], bool] | None = None) -> bytes:
        """Rows by id: `len(row_ids) * row_bytes` bytes as stored.

        Raises BadRow, RowsLost, TableChanged, TableUnavailable after `lookup_deadline_s`, and
        LookupCancelled when `cancelled` says so between two tries.
        """
        step = self._max_rows_per_request()
        pieces = (row_ids[i : i + step] for i in range(0, len(row_ids), step))
        requests = [table_service_pb2.LookupRequest(row_ids_le64=row_ids_le64(p)) for p in pieces]
        return self._lookup(requests, len(row_ids), cancelled)

    def lookup_tokens(
        self,
        tokens: Sequence[int],
        context: Sequence[int] = (),
        *,
        cancelled: Callable[[], bool] | None = None,
    ) -> bytes:
        """Rows of tokens, hashed by the daemon: `[len(tokens), heads, row_bytes]` bytes as stored.

        `context` holds the raw ids before tokens[0], oldest first; none means the start of a sequence.
        Raises as `lookup_rows`.
        """
        heads = len(self.description.hash.head_sizes)
        context_len = self.description.hash.ngram_size - 1
        step = max(1, self._max_rows_per_request() // heads)
        requests = [
            table_service_pb2.LookupRequest(
                span=_span(
                    tokens[i : i + step], [*context, *tokens[max(0, i - context_len) : i]][-context_len:]
                )
            )
            for i in range(0, len(tokens), step)
        ]
        return self._lookup(requests, len(tokens) * heads, cancelled)

    # -- hints ---------------------------------------------------------------------------------------

    def prefetch(
        self, request_id: str, tokens: Iterable[int], context: Iterable[int] = (), epoch: int = 0
    ) -> None:
        """Ask for a prompt's rows to be read ahead. Neither blocks nor raises: a hint may be lost."""
        self._sender.put(
            table_service_pb2.PrefetchRequest(request_id=request_id, epoch=epoch, span=_span(tokens, context))
        )

    def cancel_prefetch(self, request_id: str, epoch: int = 0) -> None:
        """Take a hint back. Neither blocks nor raises."""
        self._sender.put(table_service_pb2.CancelPrefetchRequest(request_id=request_id, epoch=epoch))

    # -- life ----------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the connection; lookups that wait raise TableUnavailable."""
        self._closed.set()
        self._sender.close(self._options.call_deadline_s)
        with self._lock:
            if self._live is not None:
                self._live.close()
            self._live = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- inside --------------------------------------------------------------------------------------

    def _describe_known(self) -> table_service_pb2.DescribeResponse:
        if self._described is None:
            raise TableUnavailable(f"nothing known of the table at {self.address} yet")
        return self._described

    def _max_rows_per_request(self) -> int:
        return max(1, self.described.limits.max_rows_per_stream_lookup)

    def _lookup(
        self,
        requests: list[table_service_pb2.LookupRequest],
        num_rows: int,
        cancelled: Callable[[], bool] | None,
    ) -> bytes:
        described = self.described
        for request in requests:
            request.expected_fingerprint = described.fingerprint
        expected_bytes = num_rows * described.table.row_bytes
        with self._recorder.lookup():
            try:
                rows = self._lookup_until_answered(requests, expected_bytes, cancelled)
            finally:
                self._recorder.wait_ended()
            if len(rows) != expected_bytes:
                raise TableError(
                    f"the daemon at {self.address} sent {len(rows)} bytes, expected {expected_bytes}"
                )
            return rows

    def _lookup_until_answered(
        self,
        requests: list[table_service_pb2.LookupRequest],
        expected_bytes: int,
        cancelled: Callable[[], bool] | None,
    ) -> bytes:
        options = self._options
        deadline = time.monotonic() + options.lookup_deadline_s
        attempt_s = options.hang_check_s
        backoff = _Backoff(options)
        while True:
            connection = None
            try:
                connection = self._connect(deadline)
                return self._send(connection, requests, expected_bytes, min(attempt_s, remaining_s(deadline)))
            except TableUnavailable as error:
                self._recorder.wait_began()
                if cancelled is not None and cancelled():
                    raise LookupCancelled("the caller gave the lookup up") from error
                if remaining_s(deadline) == 0 or self._closed.is_set():
                    raise TableUnavailable(
                        f"no rows from {self.address} in {options.lookup_deadline_s:g} s ({error})"
                    ) from error
                if error.sent and connection is not None:
                    self._recorder.add(lookups_repeated=1)
                if connection is not None and self._answers(connection):
                    # A slow or draining peer, not a dead one: what it has read so far stays cached.
                    attempt_s *= 2
                else:
                    attempt_s = options.hang_check_s
                    self._drop(connection)
                self._pause(backoff, deadline)

    def _send(
        self,
        connection: Connection,
        requests: list[table_service_pb2.LookupRequest],
        expected_bytes: int,
        timeout_s: float,
    ) -> bytes:
        try:
            if not requests:
                return b""
            if len(requests) == 1 and expected_bytes <= self._describe_known().limits.stream_chunk_bytes:
                return connection.lookup(requests[0], timeout_s)
            return connection.lookup_stream(requests, timeout_s)
        except ValueError as error:  # another thread closed the channel
            raise TableUnavailable(f"connection closed: {error}") from error

    def _answers(self, connection: Connection) -> bool:
        """Whether the peer of a lookup that failed still answers Describe."""
        try:
            connection.describe(min(self._options.call_deadline_s, self._options.hang_check_s))
        except (TableError, ValueError):
            return False
        return True

    def _connect(self, deadline: float) -> Connection:
        """The live connection, or a new one. One thread connects, the others wait for it."""
        with self._lock:
            if self._closed.is_set():
                raise TableUnavailable("the client is closed")
            if self._live is not None:
                return self._live
            fingerprint = None if self._described is None else self._described.fingerprint
            timeout_s = min(self._options.call_deadline_s, remaining_s(deadline))
            self._live, described = open_connection(self.address, fingerprint, timeout_s, self._credentials)
            if self._described is not None:
                self._recorder.add(reconnects=1)
                _log.warning(
                    "table daemon connected again address=%s instance=%s",
                    self.address,
                    described.instance_id.hex(),
                )
            self._described = described
            return self._live

    def _drop(self, connection: Connection | None) -> None:
        """Close a connection that failed, unless another thread already replaced it."""
        with self._lock:
            if connection is None or self._live is not connection:
                return
            self._live = None
            _log.warning("table daemon lost address=%s", self.address)
        connection.close()

    def _pause(self, backoff: "_Backoff", deadline: float) -> None:
        self._closed.wait(min(backoff.next_s(), remaining_s(deadline)))


class _Backoff:
    """Exponential, with jitter so that several clients do not return in step."""

    def __init__(self, options: ClientOptions) -> None:
        self._next_s = options.backoff_min_s
        self._max_s = options.backoff_max_s

    def next_s(self) -> float:
        delay_s = self._next_s * random.uniform(0.5, 1.0)  # noqa: S311 - not a secret
        self._next_s = min(self._next_s * 2, self._max_s)
        return delay_s


def _span(tokens: Iterable[int], context: Iterable[int]) -> table_pb2.TokenSpan:
    return table_pb2.TokenSpan(tokens_le32=tokens_le32(tokens), context_le32=tokens_le32(context))
