"""Sends prefetch hints from a thread of its own, so that admission never waits for the daemon."""

import logging
import threading
from collections import deque
from collections.abc import Callable

from ple_rpc.connection import Connection
from ple_rpc.errors import TableError
from ple_rpc.stats import StatsRecorder
from ple_rpc.table.v1 import table_service_pb2

_log = logging.getLogger(__name__)

_Hint = table_service_pb2.PrefetchRequest | table_service_pb2.CancelPrefetchRequest


class PrefetchSender:
    """A bounded queue of hints and the thread that sends them.

    A hint is worth something only when it is early and the daemon is there: under pressure the oldest is
    dropped, and nothing is ever sent twice.
    """

    def __init__(
        self,
        connection: Callable[[], Connection | None],
        stats: StatsRecorder,
        *,
        queue_limit: int,
        call_deadline_s: float,
    ) -> None:
        self._connection = connection
        self._stats = stats
        self._queue_limit = queue_limit
        self._call_deadline_s = call_deadline_s
        self._hints: deque[_Hint] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    def put(self, hint: _Hint) -> None:
        """Queue a hint. Never blocks on the daemon and never raises for it."""
        with self._changed:
            if self._closed:
                return
            if isinstance(hint, table_service_pb2.CancelPrefetchRequest) and self._withdraw(hint):
                return
            if len(self._hints) >= self._queue_limit:
                self._hints.popleft()
                self._stats.add(prefetches_dropped=1)
            self._hints.append(hint)
            self._start()
            self._changed.notify()

    def close(self, timeout_s: float) -> None:
        with self._changed:
            self._closed = True
            self._hints.clear()
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _withdraw(self, cancel: table_service_pb2.CancelPrefetchRequest) -> bool:
        """Take back a hint that was not sent yet; whether there was one."""
        for hint in self._hints:
            is_prefetch = isinstance(hint, table_service_pb2.PrefetchRequest)
            if is_prefetch and (hint.request_id, hint.epoch) == (cancel.request_id, cancel.epoch):
                self._hints.remove(hint)
                return True
        return False

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ple-prefetch-sender", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or bool(self._hints))
                if self._closed:
                    return
                hint = self._hints.popleft()
            self._send(hint)

    def _send(self, hint: _Hint) -> None:
        connection = self._connection()
        sent = False
        if connection is not None:
            try:
                sent = self._call(connection, hint)
            except (TableError, ValueError) as error:  # ValueError: the channel was closed meanwhile
                _log.debug("prefetch hint lost: %s", error)
        if isinstance(hint, table_service_pb2.PrefetchRequest):
            self._stats.add(**{"prefetches_sent" if sent else "prefetches_dropped": 1})

    def _call(self, connection: Connection, hint: _Hint) -> bool:
        if isinstance(hint, table_service_pb2.PrefetchRequest):
            return connection.prefetch(hint, self._call_deadline_s)
        return connection.cancel_prefetch(hint, self._call_deadline_s)
