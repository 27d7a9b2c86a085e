"""Lets decode steps go first: whoever does bulk work asks here before its next piece."""

import threading


class DecodeGate:
    """Counts the decode-class lookups in progress: `with gate:` around each of them."""

    def __init__(self) -> None:
        self._condition = threading.Condition(threading.Lock())
        self._active = 0

    def __enter__(self) -> None:
        with self._condition:
            self._active += 1

    def __exit__(self, *_: object) -> None:
        with self._condition:
            self._active -= 1
            if self._active == 0:
                self._condition.notify_all()

    def wait_clear(self, timeout_s: float) -> bool:
        """Wait until no decode-class lookup runs; False when the timeout passed first."""
        if self._active == 0:  # a stale read costs one window, not correctness
            return True
        with self._condition:
            return self._condition.wait_for(lambda: self._active == 0, timeout_s)
