"""A scripted daemon: a real gRPC server on a real socket whose answers a test decides."""

import hashlib
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest

from ple_rpc.connection import PROTOCOL_VERSION
from ple_rpc.table.v1 import table_pb2, table_service_pb2, table_service_pb2_grpc

ROW_BYTES = 8
ROWS = 10_000
HEADS = 2


def row(row_id: int) -> bytes:
    """The content of a row: no two are equal."""
    return struct.pack("<q", row_id * 7919 + 1)


def rows_of_token(token: int, before: int) -> list[int]:
    """A toy hash: enough to see which context each token was sent with."""
    return [token % ROWS, (token * 31 + before) % ROWS]


class ScriptedTable(table_service_pb2_grpc.TableServiceServicer):
    """Answers as a daemon would, but for what a test scripts."""

    def __init__(self, content: bytes = b"table") -> None:
        self.fingerprint = hashlib.sha256(content).digest()
        self.max_rows_per_stream_lookup = 1_000
        self.stream_chunk_bytes = 256
        self.refusals: list[grpc.StatusCode] = []
        self.hold: threading.Event | None = None
        self.lookups_seen = 0
        self.hints: list[object] = []
        self.arrived = threading.Condition()

    def Describe(self, request, context):
        return table_service_pb2.DescribeResponse(
            protocol_version=PROTOCOL_VERSION,
            fingerprint=self.fingerprint,
            table=table_pb2.TableDescription(
                row_type=table_pb2.ROW_TYPE_F32,
                row_elements=2,
                row_bytes=ROW_BYTES,
                rows=ROWS,
                used_rows=ROWS,
                hash=table_pb2.HashConstants(
                    ngram_size=3, heads_per_ngram=1, head_sizes=[ROWS] * HEADS, head_offsets=[0] * HEADS
                ),
            ),
            limits=table_pb2.Limits(
                max_rows_per_unary_lookup=self.max_rows_per_stream_lookup,
                max_rows_per_stream_lookup=self.max_rows_per_stream_lookup,
                stream_chunk_bytes=self.stream_chunk_bytes,
            ),
        )

    def Lookup(self, request, context):
        return table_service_pb2.LookupResponse(rows=self._rows(request, context))

    def LookupStream(self, request_iterator, context):
        for request in request_iterator:
            rows = self._rows(request.lookup, context)
            chunks = [rows[i : i + self.stream_chunk_bytes] for i in range(0, len(rows), 256)]
            for number, chunk in enumerate(chunks):
                yield table_service_pb2.LookupStreamResponse(
                    lookup_id=request.lookup_id, rows=chunk, last=number == len(chunks) - 1
                )

    def Prefetch(self, request, context):
        self._note(request)
        return table_service_pb2.PrefetchResponse(accepted=True)

    def CancelPrefetch(self, request, context):
        self._note(request)
        return table_service_pb2.CancelPrefetchResponse(cancelled=True)

    def _note(self, hint) -> None:
        with self.arrived:
            self.hints.append(hint)
            self.arrived.notify_all()

    def _rows(self, request, context) -> bytes:
        with self.arrived:
            self.lookups_seen += 1
            refusal = self.refusals.pop(0) if self.refusals else None
            self.arrived.notify_all()
        if refusal is not None:
            context.abort(refusal, f"scripted {refusal.name}")
        if request.expected_fingerprint not in (b"", self.fingerprint):
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "another table")
        if self.hold is not None:
            self.hold.wait(30)
        return b"".join(row(row_id) for row_id in self._ids(request))

    @staticmethod
    def _ids(request) -> list[int]:
        if request.WhichOneof("query") == "row_ids_le64":
            return list(struct.unpack(f"<{len(request.row_ids_le64) // 8}q", request.row_ids_le64))
        span = request.span
        tokens = struct.unpack(f"<{len(span.tokens_le32) // 4}i", span.tokens_le32)
        history = struct.unpack(f"<{len(span.context_le32) // 4}i", span.context_le32)
        before = [*history, *tokens]
        offset = len(history)
        ids: list[int] = []
        for i, token in enumerate(tokens):
            ids += rows_of_token(token, before[offset + i - 1] if offset + i else -1)
        return ids


class Daemon:
    """Starts and stops servers of one table on one socket path."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.table = ScriptedTable()
        self._server: grpc.Server | None = None

    @property
    def address(self) -> str:
        return f"unix:{self.path}"

    def start(self) -> None:
        self._server = grpc.server(futures.ThreadPoolExecutor(8, thread_name_prefix="played-daemon"))
        table_service_pb2_grpc.add_TableServiceServicer_to_server(self.table, self._server)
        self._server.add_insecure_port(self.address)
        self._server.start()

    def stop(self) -> None:
        """End at once, as a kill does: calls in flight break."""
        if self._server is not None:
            self._server.stop(None).wait(10)
        self._server = None


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    daemon = Daemon(tmp_path / "t.sock")
    daemon.start()
    yield daemon
    if daemon.table.hold is not None:
        daemon.table.hold.set()
    daemon.stop()


@pytest.fixture
def mute_socket(tmp_path: Path) -> Iterator[str]:
    """A peer that accepts connections and never says a word, as a stopped process does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / "m.sock"))
        listener.listen(16)
        yield f"unix:{tmp_path / 'm.sock'}"
