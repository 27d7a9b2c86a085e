"""Rows over gRPC: one long-lived bidirectional stream, which costs a lookup less than a call of its own."""

import math
import queue
import threading
import time
from collections.abc import Callable, Iterator

import grpc

from ple_rpc.errors import TableUnavailable, from_rpc_error
from ple_rpc.table.v1 import table_service_pb2

_Request = table_service_pb2.LookupStreamRequest
_Answer = table_service_pb2.LookupStreamResponse


class LookupStream:
    """One lookup at a time, whose thread waits for the answers itself, without a hand-over from another.

    A stream on which a lookup failed, or that is not `is_open` any more, is of no further use: close it.
    """

    def __init__(self, call: Callable[[Iterator[_Request]], Iterator[_Answer]]) -> None:
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._call = call(iter(self._requests.get, None))
        self._guard = _DeadlineGuard(self._call.cancel)  # type: ignore[attr-defined]

    @property
    def is_open(self) -> bool:
        """False once a deadline has passed, if only just as the answer came."""
        return not self._guard.has_fired

    def lookup(self, requests: list[table_service_pb2.LookupRequest], timeout_s: float) -> bytes:
        """Rows of the requests, concatenated in order. Raises a TableError."""
        self._guard.expect(timeout_s)
        parts: list[bytes] = []
        for number, request in enumerate(requests):
            self._requests.put(_Request(lookup_id=number, lookup=request))
        unfinished = len(requests)
        try:
            while unfinished:
                answer = next(self._call)
                parts.append(answer.rows)
                unfinished -= answer.last
        except StopIteration:
            raise TableUnavailable("the daemon ended a lookup stream early", sent=True) from None
        except grpc.RpcError as error:
            if self._guard.has_fired:
                raise TableUnavailable(f"no rows within {timeout_s:g} s", sent=True) from None
            raise from_rpc_error(error) from error
        self._guard.relax()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        self._guard.end()
        self._requests.put(None)  # ends the thread in which gRPC waits for requests
        self._call.cancel()  # type: ignore[attr-defined]


class _DeadlineGuard:
    """Cancels a call whose answer is late, since waiting for the next message of a stream has no deadline.

    Its thread sleeps until the deadline of the lookup that it saw last and looks again then: of lookups that
    come one after the other, it is woken for few.
    """

    def __init__(self, cancel: Callable[[], object]) -> None:
        self.has_fired = False
        self._cancel = cancel
        self._deadline = self._wakes_at = math.inf
        self._look = threading.Event()
        self._lock = threading.Lock()  # either the deadline passes or the answer comes
        self._ended = False
        threading.Thread(target=self._run, name="ple-lookup-deadline", daemon=True).start()

    def expect(self, timeout_s: float) -> None:
        """Cancel in `timeout_s`, unless relaxed before."""
        self._deadline = time.monotonic() + timeout_s
        if self._deadline < self._wakes_at:
            self._look.set()

    def relax(self) -> None:
        """The answer is there: from now on `has_fired` is final until the next `expect`."""
        with self._lock:
            self._deadline = math.inf

    def end(self) -> None:
        self._ended = True
        self._look.set()

    def _run(self) -> None:
        while not self._ended:
            # The order matters: whoever sets an earlier deadline after this line sees it, and wakes us.
            self._wakes_at = self._deadline
            with self._lock:
                remaining_s = self._deadline - time.monotonic()
                self.has_fired = remaining_s <= 0
            if self.has_fired:
                self._cancel()
                return
            self._look.wait(None if remaining_s == math.inf else remaining_s)
            self._look.clear()
