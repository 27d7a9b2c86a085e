"""Calls in progress, so that a stop can let them finish and refuse the ones that come later."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ple_rpc.errors import TableUnavailable


class Activity:
    """A count of running calls with a closed door. Thread-safe."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._running = 0
        self._closed = False

    @contextmanager
    def work(self) -> Iterator[None]:
        """Held while a call does its work. Raises TableUnavailable once the door is closed."""
        with self._condition:
            if self._closed:
                raise TableUnavailable("the daemon is draining")
            self._running += 1
        try:
            yield
        finally:
            with self._condition:
                self._running -= 1
                self._condition.notify_all()

    def close(self, timeout_s: float) -> bool:
        """Refuse new work and wait for what runs; False when some still ran at the timeout."""
        with self._condition:
            self._closed = True
            return self._condition.wait_for(lambda: self._running == 0, timeout_s)
