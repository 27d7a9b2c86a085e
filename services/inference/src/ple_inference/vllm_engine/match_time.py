"""A bound on what regular expressions of a config.json may cost."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from time import process_time


class MatchTimeout(Exception):
    """Matching took longer than it may."""


class MatchTime:
    """CPU seconds for all matching together. For the main thread, which alone can be interrupted.

    A pattern takes exponential time by nested repeats, by alternatives that overlap, or by many repeats in a
    row: which ones do is hard to tell from the pattern, so it is tried. `re` looks for signals while it
    matches, and this timer counts the process's own work, whatever else the machine does.
    """

    def __init__(self, limit_s: float) -> None:
        self._left_s = limit_s

    @contextmanager
    def spent(self) -> Iterator[None]:
        """For the time of the body. Raises MatchTimeout within it."""
        if self._left_s <= 0:
            raise MatchTimeout
        before, started_s = signal.signal(signal.SIGVTALRM, _ring), process_time()
        try:
            signal.setitimer(signal.ITIMER_VIRTUAL, self._left_s)
            yield
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, before)
            # What the timer has left is rounded up to a tick.
            self._left_s -= process_time() - started_s


def _ring(*_: object) -> None:
    raise MatchTimeout
