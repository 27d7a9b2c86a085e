"""The typed client of the PLE daemon: rows by id or by token, across restarts of the daemon."""

from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Self, overload

import grpc

from ple_rpc.connection import TLS_SCHEME, Connection
from ple_rpc.errors import NotOffered, TableError, TableUnavailable
from ple_rpc.link import Link, Patience
from ple_rpc.options import ClientOptions
from ple_rpc.packing import row_ids_le64, tokens_le32, writable_bytes
from ple_rpc.prefetch import PrefetchSender
from ple_rpc.session import LentMemory, SharedMemory, SlotRows, Ticket
from ple_rpc.shared_region import SharedRegion
from ple_rpc.stats import ClientStats, StatsRecorder
from ple_rpc.table.v1 import table_pb2, table_service_pb2

__all__ = ["ClientOptions", "TableClient"]


class TableClient:
    """Reads rows of one table. Thread-safe; nothing is opened before the first call.

    Rows come through shared memory where the daemon offers it on this host, else over gRPC. The first
    connection pins the table's fingerprint, and every lookup carries it: a daemon that comes back with
    another table raises TableChanged, and never gives rows of the wrong table.
    """

    def __init__(
        self,
        address: str,
        options: ClientOptions | None = None,
        *,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        """`address` is unix:PATH, or HOST:PORT (also tls://HOST:PORT) with `ple_rpc.tls.client_credentials`.

        Raises ValueError for a bare path and for a tls:// address without credentials.
        """
        if address.startswith(("/", "./", "../", "~")):
            raise ValueError(f"{address} looks like a path: a socket's address is unix:{address}")
        if credentials is None and address.startswith(TLS_SCHEME):
            raise ValueError(f"{address} needs credentials: see ple_rpc.tls.client_credentials")
        self.address = address
        self._options = options or ClientOptions()
        self._recorder = StatsRecorder()
        self._link = Link(address, self._options, self._recorder, credentials)
        self._sender = PrefetchSender(
            lambda: self._link.live,
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
        self._link.until_ready(deadline_s, on_wait)
        return self._known()

    @property
    def described(self) -> table_service_pb2.DescribeResponse:
        """The newest answer to Describe. Connects when nothing is known yet; raises TableError."""
        if self._link.described is None:
            self.wait_ready(self._options.lookup_deadline_s)
        return self._known()

    @property
    def description(self) -> table_pb2.TableDescription:
        """What the table is: row type, width, rows, hash constants."""
        return self.described.table

    @property
    def region(self) -> SharedRegion | None:
        """What is shared with the daemon now, if anything; another one after each new connection."""
        live = self._link.live
        if live is None or live.is_lost or live.session is None or live.session.memory is None:
            return None
        return live.session.memory.region

    @property
    def stats(self) -> ClientStats:
        return self._recorder.snapshot()

    # -- rows ----------------------------------------------------------------------------------------

    @overload
    def lookup(
        self, row_ids: Sequence[int] | Any, *, cancelled: Callable[[], bool] | None = None
    ) -> bytes: ...
    @overload
    def lookup(
        self, row_ids: Sequence[int] | Any, out: Any, *, cancelled: Callable[[], bool] | None = None
    ) -> memoryview: ...
    def lookup(
        self, row_ids: Sequence[int] | Any, out: Any = None, *, cancelled: Callable[[], bool] | None = None
    ) -> bytes | memoryview:
        """Rows by id: `len(row_ids) * row_bytes` bytes as stored, in the writable buffer `out` when given.

        `row_ids` is a sequence of ints or a contiguous buffer of int64. Raises BadRow, RowsLost,
        TableChanged, TableUnavailable after `lookup_deadline_s`, and LookupCancelled when `cancelled` says so
        between two tries.
        """
        ids, described = row_ids_le64(row_ids), self.described
        size = len(ids) // 8 * described.table.row_bytes
        target = None if out is None else writable_bytes(out, size)

        def send(connection: Connection, patience: Patience) -> bytes:
            memory = _memory_of(connection)
            if memory is not None:
                return _through_memory(memory, connection, ids, target, patience)
            rows = connection.lookup(self._id_requests(ids), patience.try_s) if ids else b""
            if target is not None and len(rows) == size:
                target[:] = rows
            return rows if target is None else b""

        rows = self._counted(send, size if target is None else 0, cancelled)
        return rows if target is None else target

    def lookup_into_slot(
        self, row_ids: Sequence[int] | Any, *, cancelled: Callable[[], bool] | None = None
    ) -> SlotRows:
        """Rows by id, left in the shared region for a caller that copies them itself, as a GPU does.

        Release what is returned once they are copied. Raises as `lookup`, and NotOffered without shared
        memory or for more ids than a slot holds.
        """
        ids = row_ids_le64(row_ids)

        def send(connection: Connection, patience: Patience) -> SlotRows:
            memory = _memory_of(connection)
            if memory is None or len(ids) // 8 > memory.region.layout.max_rows:
                raise NotOffered(f"{len(ids) // 8} rows in a slot of shared memory")
            return SlotRows(memory, _ask(memory, connection, ids, patience))

        with self._recorder.lookup():
            return self._link.until_answered(send, cancelled)

    def lookup_tokens(
        self,
        tokens: Sequence[int],
        context: Sequence[int] = (),
        *,
        cancelled: Callable[[], bool] | None = None,
    ) -> bytes:
        """Rows of tokens, hashed by the daemon: `[len(tokens), heads, row_bytes]` bytes as stored.

        `context` holds the raw ids before tokens[0], oldest first; none means the start of a sequence.
        Raises as `lookup`.
        """
        heads = len(self.description.hash.head_sizes)
        context_len = self.description.hash.ngram_size - 1
        step = max(1, self._max_rows_per_request() // heads)
        requests = [
            table_service_pb2.LookupRequest(
                span=_span(
                    tokens[i : i + step], [*context, *tokens[max(0, i - context_len) : i]][-context_len:]
                ),
                expected_fingerprint=self.described.fingerprint,
            )
            for i in range(0, len(tokens), step)
        ]

        def send(connection: Connection, patience: Patience) -> bytes:
            return connection.lookup(requests, patience.try_s) if requests else b""

        return self._counted(send, len(tokens) * heads * self.description.row_bytes, cancelled)

    def lend_memory(self) -> LentMemory | None:
        """This session's shared region, for native code to ring by itself; None where there is none.

        Lookups of this client then go over gRPC for as long as the session lives. A new session has a region
        of its own: ask again when `region` is another one, or None. Raises as `lookup`.
        """
        memory = _memory_of(self._link.connect(self._options.lookup_deadline_s))
        return None if memory is None else memory.lend()

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
        self._link.close()
        self._sender.close(self._options.call_deadline_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- inside --------------------------------------------------------------------------------------

    def _known(self) -> table_service_pb2.DescribeResponse:
        if self._link.described is None:
            raise TableUnavailable(f"nothing known of the table at {self.address} yet")
        return self._link.described

    def _max_rows_per_request(self) -> int:
        return max(1, self.described.limits.max_rows_per_stream_lookup)

    def _id_requests(self, ids: memoryview) -> list[table_service_pb2.LookupRequest]:
        step, fingerprint = 8 * self._max_rows_per_request(), self.described.fingerprint
        return [
            table_service_pb2.LookupRequest(
                row_ids_le64=bytes(ids[start : start + step]), expected_fingerprint=fingerprint
            )
            for start in range(0, len(ids), step)
        ]

    def _counted(
        self, send: Callable[[Connection, Patience], bytes], size: int, cancelled: Callable[[], bool] | None
    ) -> bytes:
        with self._recorder.lookup():
            rows = self._link.until_answered(send, cancelled)
            if len(rows) != size:
                raise TableError(f"the daemon at {self.address} sent {len(rows)} bytes, expected {size}")
            return rows


def _memory_of(connection: Connection | None) -> SharedMemory | None:
    """What lookups may use."""
    if connection is None or connection.session is None:
        return None
    memory = connection.session.memory
    return None if memory is None or memory.is_lent else memory


def _through_memory(
    memory: SharedMemory,
    connection: Connection,
    ids: memoryview,
    target: memoryview | None,
    patience: Patience,
) -> bytes:
    """Rows in `target`, or as bytes without one; long lookups in pieces of a slot."""
    step, row_bytes = 8 * memory.region.layout.max_rows, memory.region.layout.row_bytes
    parts: list[bytes] = []
    for start in range(0, len(ids), step):
        ticket = _ask(memory, connection, ids[start : start + step], patience)
        rows = memory.region.rows(ticket.slot, ticket.rows)
        if target is None:
            parts.append(bytes(rows))
        else:
            first = start // 8 * row_bytes
            target[first : first + rows.nbytes] = rows
        memory.give_back(ticket)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _ask(memory: SharedMemory, connection: Connection, ids: memoryview, patience: Patience) -> Ticket:
    """An answered ticket. One that is given up costs its slot for as long as the session lives."""
    ticket = memory.ring(ids, patience.deadline)
    try:
        while not memory.wait(ticket, patience.try_s):
            if not patience.is_worth_more(connection):
                if not (patience.is_cancelled or patience.is_over):
                    memory.give_up()
                raise TableUnavailable(f"no rows within {patience.attempt_s:g} s", sent=True)
    except BaseException:
        memory.quarantine(ticket)
        raise
    return ticket


def _span(tokens: Iterable[int], context: Iterable[int]) -> table_pb2.TokenSpan:
    return table_pb2.TokenSpan(tokens_le32=tokens_le32(tokens), context_le32=tokens_le32(context))
