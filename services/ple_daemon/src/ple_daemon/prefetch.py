"""Reads a prompt's rows ahead: one worker, bounded queue, small windows, decode steps first.

A window of rows is advised, then the window before it is populated (waited for and mapped), so that at most
two windows are in flight and a later lookup finds mapped pages. Prompt order is kept, since that is the order
of use; pages repeat within a prompt and are advised once, by a bitmap.
"""

import logging
import threading
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ple_daemon.counters import PrefetchCounters
from ple_daemon.page_windows import collect_windows, populate_windows, read_windows
from ple_daemon.region import PAGE_BYTES
from ple_daemon.table import Table

_log = logging.getLogger(__name__)

WINDOW_ROWS = 64
# While a decode step reads, a window waits; the bound keeps a stuck reader from stopping prefetch for good.
_DECODE_PATIENCE_S = 1.0
_IDLE_WAKE_S = 1.0

Key = tuple[bytes, str]


@dataclass(slots=True)
class _Hint:
    """A prompt that waits or is being read. `dropped` is set by whoever no longer wants it."""

    epoch: int
    tokens: npt.NDArray[np.integer]
    context: npt.NDArray[np.integer]
    dropped: threading.Event = field(default_factory=threading.Event)


class Prefetcher:
    """Owns the worker thread. A key is (session token, request id)."""

    def __init__(self, table: Table, max_queued: int, max_per_session: int | None = None) -> None:
        """`max_per_session` bounds what one session token may have waiting, but for the empty token."""
        self.counters = PrefetchCounters()
        self.max_queued = max_queued
        self._max_per_session = max_per_session or max_queued
        self._table = table
        self._heads = table.layout.constants.heads
        self._condition = threading.Condition()
        self._queue: OrderedDict[Key, _Hint] = OrderedDict()
        self._running: tuple[Key, _Hint] | None = None
        self._stopping = threading.Event()
        self._bitmap = np.zeros(table.page_bitmap_bytes, np.uint8)
        self._thread = threading.Thread(target=self._work, name="prefetch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Drop everything and end the worker; False when it did not end in time."""
        self._stopping.set()
        with self._condition:
            self._queue.clear()
            if self._running is not None:
                self._running[1].dropped.set()
            self._condition.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def queued(self) -> int:
        """Requests that wait."""
        return len(self._queue)

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing is being read."""
        with self._condition:
            return not self._queue and self._running is None

    def submit(
        self, key: Key, epoch: int, tokens: npt.NDArray[np.integer], context: npt.NDArray[np.integer]
    ) -> int | None:
        """Queue a prompt; returns its rows, or None when the hint is dropped (full queue, older epoch)."""
        with self._condition:
            known = self._known_epoch(key)
            full = key not in self._queue and self._is_full_for(key[0])
            if self._stopping.is_set() or full or (known is not None and epoch < known):
                self.counters.dropped.add(1)
                return None
            self._drop(key)
            self._queue[key] = _Hint(epoch, tokens, context)
            self._condition.notify()
        self.counters.accepted.add(1)
        return len(tokens) * self._heads

    def cancel_session(self, token: bytes) -> None:
        """Drop all that is left of a session's requests."""
        with self._condition:
            running = [] if self._running is None else [self._running[0]]
            for key in [*self._queue, *running]:
                if key[0] == token:
                    self._drop(key)

    def cancel(self, key: Key, epoch: int) -> bool:
        """Drop what is left of a request, unless a newer epoch has taken its place."""
        with self._condition:
            known = self._known_epoch(key)
            if known is None or epoch < known:
                return False
            self._drop(key)
        self.counters.cancelled.add(1)
        return True

    def _is_full_for(self, token: bytes) -> bool:
        of_session = sum(1 for other, _ in self._queue if other == token) if token else 0
        return len(self._queue) >= self.max_queued or of_session >= self._max_per_session

    def _known_epoch(self, key: Key) -> int | None:
        if key in self._queue:
            return self._queue[key].epoch
        if self._running is not None and self._running[0] == key and not self._running[1].dropped.is_set():
            return self._running[1].epoch
        return None

    def _drop(self, key: Key) -> None:
        self._queue.pop(key, None)
        if self._running is not None and self._running[0] == key:
            self._running[1].dropped.set()

    def _work(self) -> None:
        while not self._stopping.is_set():
            hint = self._next()
            if hint is None:
                continue
            try:
                self._read_ahead(hint)
            except Exception:
                # A hint is never worth the worker: the lookup that needs the rows reports what is wrong.
                self.counters.failures.add(1)
                _log.exception("prefetch failed")
            finally:
                with self._condition:
                    self._running = None

    def _next(self) -> _Hint | None:
        with self._condition:
            self._condition.wait_for(lambda: self._queue or self._stopping.is_set(), _IDLE_WAKE_S)
            if not self._queue:
                return None
            self._running = self._queue.popitem(last=False)
            return self._running[1]

    def _read_ahead(self, hint: _Hint) -> None:
        self._bitmap.fill(0)
        for rows in self._table.hash.pieces(hint.tokens, hint.context):
            windows = collect_windows(
                rows.reshape(-1), self._table.places, self._table.layout.row_bytes,
                self._table.first_address, self._bitmap,
            )  # fmt: skip
            if not self._read_windows(hint, windows):
                return
            self.counters.rows.add(rows.size)

    def _read_windows(self, hint: _Hint, windows: npt.NDArray[np.int64]) -> bool:
        """False when the hint was dropped or a file cannot be read."""
        advisor = self._table.advisor
        before = windows[:0]
        for start in range(0, len(windows) + WINDOW_ROWS, WINDOW_ROWS):
            self._table.gate.wait_clear(_DECODE_PATIENCE_S)
            if hint.dropped.is_set() or self._table.watch.change is not None:
                return False
            window = windows[start : start + WINDOW_ROWS]
            read_windows(window, self._table.places, advisor.code, advisor.pidfd)
            if populate_windows(before):
                self.counters.failures.add(1)
                self._table.watch.check()
                return False
            self.counters.pages.add(int(before[:, 1].sum()) // PAGE_BYTES)
            before = window
        return True
