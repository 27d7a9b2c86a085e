"""Lets decode steps go first: whoever does bulk work asks here before its next piece."""

import threading
import time

import numpy as np

# A decode step of the native plane cannot notify a condition; it takes some 10 to 1,000 microseconds.
_NAP_S = 50e-6


class DecodeGate:
    """Counts the decode-class lookups in progress: `with gate:` around each of them.

    `active` is int64 [2] and is read by kernels: lookups that hold the gate, and 1 while the shared-memory
    plane reads for a decode step.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition(threading.Lock())
        self.active = np.zeros(2, np.int64)

    def __enter__(self) -> None:
        with self._condition:
            self.active[0] += 1

    def __exit__(self, *_: object) -> None:
        with self._condition:
            self.active[0] -= 1
            if self.active[0] == 0:
                self._condition.notify_all()

    def wait_clear(self, timeout_s: float) -> bool:
        """Wait until no decode-class lookup runs; False when the timeout passed first."""
        if not self.active.any():  # a stale read costs one window, not correctness
            return True
        deadline_s = time.monotonic() + timeout_s
        while self.active.any():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return False
            if self.active[0]:
                with self._condition:
                    self._condition.wait_for(lambda: self.active[0] == 0, left_s)
            else:
                time.sleep(_NAP_S)
        return True
