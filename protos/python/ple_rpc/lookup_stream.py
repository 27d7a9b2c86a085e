"""Rows over gRPC: one long-lived bidirectional stream, which costs a lookup less than a call of its own."""

import queue
import threading
import time
from collections.abc import Callable, Iterator

import grpc

from ple_rpc.errors import TableError, TableUnavailable, from_rpc_error
from ple_rpc.table.v1 import table_service_pb2

_Request = table_service_pb2.LookupStreamRequest
_Answer = table_service_pb2.LookupStreamResponse


class LookupStream:
    """One lookup at a time. A thread reads the answers, so that waiting for one has a deadline.

    A stream on which a lookup failed is of no further use: close it.
    """

    def __init__(self, call: Callable[[Iterator[_Request]], Iterator[_Answer]]) -> None:
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[_Answer | TableError] = queue.SimpleQueue()
        self._call = call(iter(self._requests.get, None))
        threading.Thread(target=self._read, name="ple-lookup-stream", daemon=True).start()

    def lookup(self, requests: list[table_service_pb2.LookupRequest], timeout_s: float) -> bytes:
        """Rows of the requests, concatenated in order. Raises a TableError."""
        deadline = time.monotonic() + timeout_s
        parts: list[bytes] = []
        for number, request in enumerate(requests):
            self._requests.put(_Request(lookup_id=number, lookup=request))
        unfinished = len(requests)
        while unfinished:
            try:
                answer = self._answers.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise TableUnavailable(f"no rows within {timeout_s:g} s", sent=True) from None
            if isinstance(answer, TableError):
                raise answer
            parts.append(answer.rows)
            unfinished -= answer.last
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        self._requests.put(None)  # ends the thread in which gRPC waits for requests
        self._call.cancel()  # type: ignore[attr-defined]

    def _read(self) -> None:
        try:
            for answer in self._call:
                self._answers.put(answer)
            self._answers.put(TableUnavailable("the daemon ended a lookup stream early", sent=True))
        except grpc.RpcError as error:
            self._answers.put(from_rpc_error(error))
