"""Lets decode steps go first: whoever does bulk work asks here before its next piece."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class DecodeGate:
    """Counts the decode-class lookups in progress."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._active = 0

    @contextmanager
    def decode(self) -> Iterator[None]:
        """Held for the time of one decode-class lookup."""
        with self._condition:
            self._active += 1
        try:
            yield
        finally:
            with self._condition:
                self._active -= 1
                if self._active == 0:
                    self._condition.notify_all()

    def wait_clear(self, timeout_s: float) -> bool:
        """Wait until no decode-class lookup runs; False when the timeout passed first."""
        with self._condition:
            return self._condition.wait_for(lambda: self._active == 0, timeout_s)
