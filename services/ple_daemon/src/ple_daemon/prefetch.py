"""Reads prompts' rows ahead: one worker, bounded queue, small windows, decode steps first.

A window of rows is advised, then the window before it is populated (waited for and mapped), so that at most
two windows are in flight and a later lookup finds mapped pages. Prompt order is kept, since that is the order
of use; pages repeat within a prompt and are advised once, by a bitmap. A few prompts are read at once and
take turns by window, so that a short one does not wait behind a long one.
"""

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from ple_daemon.counters import PrefetchCounters
from ple_daemon.gather import Int64Array
from ple_daemon.memory import available_bytes
from ple_daemon.page_windows import populate_windows, read_windows
from ple_daemon.prefetch_hint import Bitmap, Hint, Key
from ple_daemon.region import PAGE_BYTES
from ple_daemon.table import Table
from ple_daemon.window_pace import WindowPace

_log = logging.getLogger(__name__)

MAX_ACTIVE = 4
# While a decode step reads, a window waits; the bound keeps a stuck reader from stopping prefetch for good.
_DECODE_PATIENCE_S = 1.0
_IDLE_WAKE_S = 1.0
# Prompts together may be read ahead by this share of MemAvailable; more pushes out what is about to be used.
_AHEAD_SHARE = 0.5
_MEMORY_LOOK_S = 1.0
# A prompt that is far enough ahead looks this often whether its user has moved; the limit gives it up.
_PARKED_LOOK_S = 0.05
_PARKED_LIMIT_S = 60.0


class _Turn:
    """A hint that is being read, with its windows to come and the bitmap that it holds meanwhile."""

    def __init__(self, hint: Hint, table: Table, bitmap: Bitmap, window_rows: Callable[[], int]) -> None:
        bitmap.fill(0)
        hint.begin(table.counters.rows.value)
        self.hint = hint
        self.bitmap = bitmap
        self.windows: Iterator[tuple[Int64Array, int]] = hint.windows(table, bitmap, window_rows)


class Prefetcher:
    """Owns the worker thread. A key is (session token, request id)."""

    def __init__(
        self,
        table: Table,
        max_queued: int,
        max_per_session: int | None = None,
        observe: Callable[[float], None] = lambda _: None,
    ) -> None:
        """`max_per_session` bounds what one session token may have waiting, but for the empty token.

        `observe` gets the seconds from a hint's arrival to its last page.
        """
        self._observe = observe
        self.counters = PrefetchCounters()
        self.pace = WindowPace()
        self.max_queued = max_queued
        self._max_per_session = max_per_session or max_queued
        self._table = table
        self._heads = table.layout.constants.heads
        self._condition = threading.Condition()
        self._queue: OrderedDict[Key, Hint] = OrderedDict()
        self._active: deque[_Turn] = deque()
        self._bitmaps = [np.zeros(table.page_bitmap_bytes, np.uint8) for _ in range(MAX_ACTIVE)]
        self._in_flight: tuple[Hint, Int64Array, int] | None = None
        self._ahead_pages = 0
        self._memory_looked_s = -_MEMORY_LOOK_S
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work, name="prefetch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Drop everything and end the worker; False when it did not end in time."""
        self._stopping.set()
        with self._condition:
            self._queue.clear()
            for turn in self._active:
                turn.hint.is_dropped = True
            self._condition.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def queued(self) -> int:
        """Requests that wait."""
        return len(self._queue)

    @property
    def active(self) -> int:
        """Requests that are being read."""
        return len(self._active)

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing is being read."""
        return self.wait_idle(0.0)

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until nothing waits and nothing is being read; False when the timeout passed first."""
        with self._condition:
            return self._condition.wait_for(
                lambda: not self._queue and not self._active and self._in_flight is None, timeout_s
            )

    def submit(
        self, key: Key, epoch: int, tokens: npt.NDArray[np.integer], context: npt.NDArray[np.integer]
    ) -> int | None:
        """Queue a prompt; returns its rows, or None when the hint is dropped (full queue, older epoch)."""
        with self._condition:
            known = self._known_epoch(key)
            if self._stopping.is_set() or self._is_full(key) or (known is not None and epoch < known):
                self.counters.dropped.add(1)
                return None
            self._drop(key)
            self._queue[key] = Hint(key, epoch, tokens, context)
            self._condition.notify_all()
        self.counters.accepted.add(1)
        return len(tokens) * self._heads

    def cancel(self, key: Key, epoch: int) -> bool:
        """Drop what is left of a request, unless a newer epoch has taken its place."""
        with self._condition:
            known = self._known_epoch(key)
            if known is None or epoch < known:
                return False
            self._drop(key)
        self.counters.cancelled.add(1)
        return True

    def cancel_session(self, token: bytes) -> int:
        """Drop everything of a session that ended; returns how many requests that were."""
        with self._condition:
            keys = {key for key in self._queue if key[0] == token}
            keys |= {
                turn.hint.key
                for turn in self._active
                if turn.hint.key[0] == token and not turn.hint.is_dropped
            }
            for key in keys:
                self._drop(key)
        self.counters.cancelled.add(len(keys))
        return len(keys)

    def _is_full(self, key: Key) -> bool:
        if key in self._queue:
            return False
        of_session = sum(other[0] == key[0] for other in self._queue) if key[0] else 0
        return len(self._queue) >= self.max_queued or of_session >= self._max_per_session

    def _known_epoch(self, key: Key) -> int | None:
        if key in self._queue:
            return self._queue[key].epoch
        return next((h.epoch for h in self._reading(key) if not h.is_dropped), None)

    def _drop(self, key: Key) -> None:
        self._queue.pop(key, None)
        for hint in self._reading(key):
            hint.is_dropped = True
        self._condition.notify_all()

    def _reading(self, key: Key) -> list[Hint]:
        return [turn.hint for turn in self._active if turn.hint.key == key]

    # -- the worker ----------------------------------------------------------------------------------------

    def _work(self) -> None:
        while not self._stopping.is_set():
            turn = self._next_turn()
            if turn is None and self._in_flight is None:
                continue
            try:
                self._take(turn)
            except Exception:
                # A hint is never worth the worker: the lookup that needs the rows reports what is wrong.
                self.counters.failures.add(1)
                _log.exception("prefetch failed")
                self._in_flight = None
                if turn is not None:
                    turn.hint.is_dropped = True

    def _next_turn(self) -> _Turn | None:
        """Whose window is next, or None when there is none for now. Waits when there is nothing to do."""
        with self._condition:
            self._retire()
            while self._queue and self._bitmaps:
                _, hint = self._queue.popitem(last=False)
                self._active.append(_Turn(hint, self._table, self._bitmaps.pop(), lambda: self.pace.rows))
            for _ in range(len(self._active)):
                turn = self._active[0]
                self._active.rotate(-1)
                if self._may_go_on(turn.hint):
                    return turn
            if self._in_flight is None:
                busy = bool(self._active)
                if not busy:
                    self._condition.notify_all()
                self._condition.wait_for(self._has_news, _PARKED_LOOK_S if busy else _IDLE_WAKE_S)
            return None

    def _has_news(self) -> bool:
        ended = any(turn.hint.is_dropped for turn in self._active)
        return self._stopping.is_set() or ended or bool(self._queue and self._bitmaps)

    def _retire(self) -> None:
        for turn in [turn for turn in self._active if turn.hint.is_dropped]:
            self._end(turn)

    def _end(self, turn: _Turn) -> None:
        self._active.remove(turn)
        self._bitmaps.append(turn.bitmap)

    def _may_go_on(self, hint: Hint) -> bool:
        """Whether the hint is not too far ahead of its user; one that is for too long is dropped."""
        now_s = time.monotonic()
        if now_s - self._memory_looked_s >= _MEMORY_LOOK_S:
            self._memory_looked_s = now_s
            self._ahead_pages = int(available_bytes() * _AHEAD_SHARE) // PAGE_BYTES
        if hint.pages_ahead(self._table.counters.rows.value) < max(1, self._ahead_pages // len(self._active)):
            hint.moved_s = now_s
            return True
        if now_s - hint.moved_s > _PARKED_LIMIT_S:
            hint.is_dropped = True
            self.counters.parked.add(1)
        return False

    def _take(self, turn: _Turn | None) -> None:
        """Advise the next window of `turn`, then wait for the one before it, whosever that is."""
        self._table.gate.wait_clear(_DECODE_PATIENCE_S)
        before, self._in_flight = self._in_flight, None
        if self._table.watch.change is not None:
            self._drop_all()
        elif turn is not None and not turn.hint.is_dropped:
            self._advise(turn)
        if before is not None:
            self._finish(*before)

    def _advise(self, turn: _Turn) -> None:
        window, rows = next(turn.windows, (None, 0))
        if window is None:
            with self._condition:
                self._end(turn)
            self._observe(time.monotonic() - turn.hint.arrived_s)
            return
        advisor = self._table.advisor
        read_windows(window, self._table.places, advisor.code, advisor.pidfd)
        turn.hint.pages_read += _pages(window)
        self._in_flight = turn.hint, window, rows

    def _finish(self, hint: Hint, window: Int64Array, rows: int) -> None:
        if hint.is_dropped:
            return
        start_s = time.perf_counter()
        unreadable = populate_windows(window)
        self.pace.took(len(window), time.perf_counter() - start_s)
        if unreadable:
            hint.is_dropped = True
            self.counters.failures.add(1)
            self._table.watch.check()
            return
        self._table.marks.set(window)
        self.counters.pages.add(_pages(window))
        self.counters.rows.add(rows)

    def _drop_all(self) -> None:
        with self._condition:
            for turn in self._active:
                turn.hint.is_dropped = True


def _pages(windows: Int64Array) -> int:
    return int(windows[:, 1].sum()) // PAGE_BYTES
