"""Between the wire and the table: parses requests, keeps limits, maps errors to status codes."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
import numpy as np

from ple_daemon.activity import Activity
from ple_daemon.gather import Int64Array
from ple_daemon.memory import major_faults
from ple_daemon.metrics import LookupMetrics
from ple_daemon.prefetch import Prefetcher
from ple_daemon.sessions import Sessions
from ple_daemon.shm_board import MAX_SLOTS
from ple_daemon.table import DECODE_MAX_ROWS, Table
from ple_daemon.table_format import RowType, TableLayout
from ple_rpc.errors import (
    BadRequest,
    QuotaExceeded,
    TableChanged,
    TableError,
    code_of,
)
from ple_rpc.table.v1 import table_pb2, table_service_pb2, table_service_pb2_grpc

_log = logging.getLogger(__name__)

PROTOCOL_VERSION = 1
MAX_MESSAGE_BYTES = 16 * 1024 * 1024
STREAM_CHUNK_BYTES = 2 * 1024 * 1024
# Room for everything in a message that is not rows or ids.
_ENVELOPE_BYTES = 4096
_MAX_TOKENS_PER_PREFETCH = 1 << 18
_MAX_ROWS_PER_STREAM_LOOKUP = 1 << 18
# A slot holds a prefill chunk with drafts: 8,192 tokens with 16 rows each, twice.
_MAX_ROWS_PER_SLOT = 1 << 18
_MAX_REGION_BYTES = 1 << 30
_ROW_TYPES = {
    RowType.BF16: table_pb2.ROW_TYPE_BF16,
    RowType.FP8_E4M3: table_pb2.ROW_TYPE_FP8_E4M3,
    RowType.F32: table_pb2.ROW_TYPE_F32,
}


@dataclass(frozen=True, slots=True)
class Offer:
    """What Describe and Attach say of this process. `quotas` are the limits of one session."""

    instance_id: bytes
    limits: table_pb2.Limits
    quotas: table_pb2.Limits
    doorbell_path: str


class TableServicer(table_service_pb2_grpc.TableServiceServicer):
    """`ple_rpc.table.v1.TableService` over one table."""

    def __init__(
        self,
        table: Table,
        prefetcher: Prefetcher,
        metrics: LookupMetrics,
        activity: Activity,
        sessions: Sessions,
        offer: Offer,
    ) -> None:
        self._table = table
        self._prefetcher = prefetcher
        self._metrics = metrics
        self._activity = activity
        self._sessions = sessions
        self._offer = offer
        self._started_s = time.monotonic()
        self._limits = offer.limits

    def Describe(  # noqa: N802
        self,
        request: table_service_pb2.DescribeRequest,  # noqa: ARG002 - the method's signature is gRPC's
        context: grpc.ServicerContext,
    ) -> table_service_pb2.DescribeResponse:
        with self._call(context):
            return table_service_pb2.DescribeResponse(
                protocol_version=PROTOCOL_VERSION,
                fingerprint=self._table.fingerprint,
                table=description(self._table.layout),
                instance_id=self._offer.instance_id,
                limits=self._limits,
                doorbell_path=self._offer.doorbell_path,
            )

    def Attach(  # noqa: N802
        self, request: table_service_pb2.AttachRequest, context: grpc.ServicerContext
    ) -> Iterator[table_service_pb2.AttachResponse]:
        with self._call(context):  # opening is work, an open stream is none
            self._check_fingerprint(request.expected_fingerprint)
            session = self._sessions.open(request.client_name)
        try:
            if context.add_callback(session.end):  # else the client is gone already
                opened = table_service_pb2.SessionOpened(
                    session_token=session.token, quotas=self._offer.quotas
                )
                yield table_service_pb2.AttachResponse(opened=opened)
                yield from session.events()
        finally:
            self._sessions.close(session)

    def Prefetch(  # noqa: N802
        self, request: table_service_pb2.PrefetchRequest, context: grpc.ServicerContext
    ) -> table_service_pb2.PrefetchResponse:
        with self._call(context):
            self._check_session(request.session_token)
            self._table.refuse_if_changed()
            tokens, before = self._span(request.span)
            if len(tokens) > self._limits.max_tokens_per_prefetch:
                raise QuotaExceeded(
                    f"{len(tokens)} tokens in one prefetch, at most {self._limits.max_tokens_per_prefetch}"
                )
            key = request.session_token, request.request_id
            queued = self._prefetcher.submit(key, request.epoch, tokens, before)
            return table_service_pb2.PrefetchResponse(accepted=queued is not None, queued_rows=queued or 0)

    def CancelPrefetch(  # noqa: N802
        self, request: table_service_pb2.CancelPrefetchRequest, context: grpc.ServicerContext
    ) -> table_service_pb2.CancelPrefetchResponse:
        with self._call(context):
            self._check_session(request.session_token)
            key = request.session_token, request.request_id
            return table_service_pb2.CancelPrefetchResponse(
                cancelled=self._prefetcher.cancel(key, request.epoch)
            )

    def Lookup(  # noqa: N802
        self, request: table_service_pb2.LookupRequest, context: grpc.ServicerContext
    ) -> table_service_pb2.LookupResponse:
        with self._call(context):
            ids = self._row_ids(request, self._limits.max_rows_per_unary_lookup)
            with self._measured(ids):
                rows = self._table.lookup(ids)
            return table_service_pb2.LookupResponse(rows=rows.tobytes())

    def LookupStream(  # noqa: N802
        self,
        request_iterator: Iterator[table_service_pb2.LookupStreamRequest],
        context: grpc.ServicerContext,
    ) -> Iterator[table_service_pb2.LookupStreamResponse]:
        for request in request_iterator:
            with self._call(context):
                yield from self._pieces(request)

    def Stats(  # noqa: N802
        self,
        request: table_service_pb2.StatsRequest,  # noqa: ARG002 - the method's signature is gRPC's
        context: grpc.ServicerContext,
    ) -> table_service_pb2.StatsResponse:
        with self._call(context):
            table, hints = self._table.counters, self._prefetcher.counters
            return table_service_pb2.StatsResponse(
                uptime_s=time.monotonic() - self._started_s,
                lookups=table.lookups.value,
                rows_served=table.rows.value,
                rows_advised=table.rows_advised.value,
                prefetches_accepted=hints.accepted.value,
                prefetches_dropped=hints.dropped.value,
                prefetches_cancelled=hints.cancelled.value,
                rows_prefetched=hints.rows.value,
                queued_prefetches=self._prefetcher.queued,
                major_faults=major_faults(),
                advice=self._table.advisor.name,
            )

    @contextmanager
    def _call(self, context: grpc.ServicerContext) -> Iterator[None]:
        """Counts the call as work in progress and turns what it raises into a status."""
        try:
            with self._activity.work():
                yield
        except TableError as error:
            _abort(context, code_of(error), str(error))

    def _pieces(
        self, request: table_service_pb2.LookupStreamRequest
    ) -> Iterator[table_service_pb2.LookupStreamResponse]:
        """The rows of one lookup, read piece by piece so that no lookup needs memory beyond one message."""
        ids = self._row_ids(request.lookup, self._limits.max_rows_per_stream_lookup)
        step = max(1, self._limits.stream_chunk_bytes // self._table.layout.row_bytes)
        with self._measured(ids):
            for start in range(0, max(1, ids.size), step):
                rows = self._table.lookup(ids[start : start + step])
                yield table_service_pb2.LookupStreamResponse(
                    lookup_id=request.lookup_id, rows=rows.tobytes(), last=start + step >= ids.size
                )

    @contextmanager
    def _measured(self, ids: Int64Array) -> Iterator[None]:
        """Records one lookup. On a stream its time includes sending all but the last piece."""
        kind = "decode" if ids.size <= DECODE_MAX_ROWS else "bulk"
        outcome, start_s = "ok", time.perf_counter()
        try:
            yield
        except TableError as error:
            outcome = code_of(error).name.lower()
            raise
        finally:
            self._metrics.seconds.labels(kind).observe(time.perf_counter() - start_s)
            self._metrics.lookups.labels(kind, outcome).inc()

    def _row_ids(self, request: table_service_pb2.LookupRequest, max_rows: int) -> Int64Array:
        self._check_fingerprint(request.expected_fingerprint)
        query = request.WhichOneof("query")
        if query is None:
            raise BadRequest("a lookup needs row ids or tokens")
        if query == "row_ids_le64":
            ids: Int64Array = _integers(request.row_ids_le64, np.dtype("<i8"), "row_ids_le64")
            _check_rows(ids.size, max_rows)
            return ids
        tokens, before = self._span(request.span)
        _check_rows(len(tokens) * self._table.layout.constants.heads, max_rows)
        return self._table.hash.row_ids(tokens, before).reshape(-1)

    def _check_fingerprint(self, expected: bytes) -> None:
        if expected and expected != self._table.fingerprint:
            raise TableChanged(
                f"the table's fingerprint is {self._table.fingerprint.hex()[:16]}, "
                f"the caller expects {expected.hex()[:16]}"
            )

    def _check_session(self, token: bytes) -> None:
        if token:
            self._sessions.require(token)

    def _span(self, span: table_pb2.TokenSpan) -> tuple[Any, Any]:
        tokens = _integers(span.tokens_le32, np.dtype("<i4"), "tokens_le32")
        before = _integers(span.context_le32, np.dtype("<i4"), "context_le32")
        if len(before) > self._table.layout.constants.context_length:
            raise BadRequest(
                f"context_le32 holds {len(before)} ids, at most {self._table.layout.constants.context_length}"
            )
        return tokens, before


def limits(layout: TableLayout, max_queued_prefetches: int) -> table_pb2.Limits:
    """Bounds that follow from the message size and the row width."""
    room = MAX_MESSAGE_BYTES - _ENVELOPE_BYTES
    return table_pb2.Limits(
        max_rows_per_unary_lookup=room // max(layout.row_bytes, 8),
        max_rows_per_stream_lookup=min(_MAX_ROWS_PER_STREAM_LOOKUP, room // 8),
        stream_chunk_bytes=STREAM_CHUNK_BYTES,
        max_tokens_per_prefetch=_MAX_TOKENS_PER_PREFETCH,
        max_queued_prefetches=max_queued_prefetches,
        max_slots=MAX_SLOTS,
        max_rows_per_slot=_MAX_ROWS_PER_SLOT,
        max_region_bytes=_MAX_REGION_BYTES,
    )


def session_quotas(limits: table_pb2.Limits, max_queued_prefetches: int) -> table_pb2.Limits:
    """The limits of one session, where they are narrower than the daemon's."""
    quotas = table_pb2.Limits()
    quotas.CopyFrom(limits)
    quotas.max_queued_prefetches = max_queued_prefetches
    return quotas


def description(layout: TableLayout) -> table_pb2.TableDescription:
    """The table as the wire describes it."""
    constants = layout.constants
    return table_pb2.TableDescription(
        row_type=_ROW_TYPES[layout.row_type],
        row_elements=layout.row_elements,
        row_bytes=layout.row_bytes,
        rows=layout.rows,
        used_rows=constants.used_rows,
        scale_bits=layout.scale_bits,
        scale_bytes=len(layout.scale),
        hash=table_pb2.HashConstants(
            ngram_size=constants.ngram_size,
            heads_per_ngram=constants.heads_per_ngram,
            eos_token_id=constants.eos_token_id,
            multipliers=constants.multipliers,
            head_sizes=constants.head_sizes,
            head_offsets=constants.head_offsets,
        ),
    )


def _integers(raw: bytes, dtype: np.dtype[Any], field: str) -> Any:
    if len(raw) % dtype.itemsize:
        raise BadRequest(f"{field} holds {len(raw)} bytes, not a multiple of {dtype.itemsize}")
    return np.frombuffer(raw, dtype).astype(dtype.newbyteorder("="))


def _check_rows(rows: int, max_rows: int) -> None:
    if rows > max_rows:
        raise QuotaExceeded(f"{rows} rows in one lookup, at most {max_rows}")


def _abort(context: grpc.ServicerContext, code: grpc.StatusCode, details: str) -> NoReturn:
    context.abort(code, details)
    raise AssertionError("abort always raises")
