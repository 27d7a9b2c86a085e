"""Watches the tail of the drive's latency while the daemon runs: one small direct read now and then.

A drive can stop answering for 100 ms to a second, for seconds on end, and then every decode step waits.
Lookups alone do not show it: what they read may be cached. The rate is low and reads give way to decode
lookups; an idle drive answers a little slower than a busy one, so the rate belongs to the figures.
"""

import logging
import mmap
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from ple_daemon.counters import Counter
from ple_daemon.decode_gate import DecodeGate
from ple_daemon.drive_reads import READ_BYTES, DirectReadError, open_direct
from ple_daemon.latency import STALL_MS

_log = logging.getLogger(__name__)

WINDOW_S = 300.0
_STALL_S = STALL_MS / 1e3
_DECODE_PATIENCE_S = 1.0

Observe = Callable[[float], None]


class DriveTail:
    """Owns the probing thread. `refusal` says why nothing is probed, or is empty."""

    def __init__(
        self,
        files: list[Path],
        gate: DecodeGate,
        interval_s: float,
        observe: Observe = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`observe` gets the seconds of every read. An interval of 0 probes nothing."""
        self.stalls = Counter()
        self.refusal = "" if interval_s else "switched off"
        self._gate = gate
        self._interval_s = interval_s
        self._observe = observe
        self._clock = clock
        self._lock = threading.Lock()
        self._recent: deque[tuple[float, float]] = deque()
        self._started_s: float | None = None
        self._stop = threading.Event()
        self._buffer = mmap.mmap(-1, READ_BYTES)
        self._fds: list[int] = []
        self._blocks: list[int] = []
        if interval_s:
            self._open(files)
        self._thread = threading.Thread(target=self._work, name="drive-tail", daemon=True)

    def start(self) -> None:
        if not self.refusal:
            self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """End the thread; False when a read held it up: its file is then left open."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
        return True

    @property
    def worst_s(self) -> float:
        """The slowest read of the last minutes, one that has not come back yet included; NaN without any."""
        return max((seconds for _, seconds in self._window()), default=float("nan"))

    @property
    def problem(self) -> str | None:
        """One sentence when the drive stalled in the last minutes."""
        window = self._window()
        stalled = [seconds for _, seconds in window if seconds > _STALL_S]
        if not stalled:
            return None
        return (
            f"drive_tail: {len(stalled)} of {len(window)} reads in the last "
            f"{WINDOW_S / 60:.0f} minutes took over {STALL_MS:.0f} ms, the worst {max(stalled) * 1e3:.0f} ms"
        )

    def record(self, seconds: float) -> None:
        """Note one read that just ended."""
        with self._lock:
            self._recent.append((self._clock(), seconds))
            self._started_s = None
        if seconds > _STALL_S:
            self.stalls.add(1)
        self._observe(seconds)

    def _window(self) -> list[tuple[float, float]]:
        now_s = self._clock()
        with self._lock:
            while self._recent and self._recent[0][0] < now_s - WINDOW_S:
                self._recent.popleft()
            pending = [] if self._started_s is None else [(now_s, now_s - self._started_s)]
            return [*self._recent, *pending]

    def _open(self, files: list[Path]) -> None:
        try:
            for path in files:
                self._fds.append(open_direct(path))
                self._blocks.append(max(1, os.fstat(self._fds[-1]).st_size // READ_BYTES))
        except DirectReadError as error:
            self.refusal = str(error)

    def _work(self) -> None:
        while not self._stop.wait(self._interval_s):
            self._gate.wait_clear(_DECODE_PATIENCE_S)
            try:
                self._probe()
            except OSError as error:
                # Lookups report bad sectors; the watch sees truncations. The tail is about time alone.
                _log.warning("drive probe failed error=%s", error.strerror)
                with self._lock:
                    self._started_s = None

    def _probe(self) -> None:
        index = random.choices(range(len(self._fds)), self._blocks)[0]  # noqa: S311 - not a secret
        offset = random.randrange(self._blocks[index]) * READ_BYTES  # noqa: S311
        start_s = self._clock()
        with self._lock:
            self._started_s = start_s
        os.preadv(self._fds[index], [self._buffer], offset)
        self.record(self._clock() - start_s)
