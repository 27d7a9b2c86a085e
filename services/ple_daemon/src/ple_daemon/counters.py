"""Counts for Stats and /metrics, kept by whoever does the work and read by whoever reports it."""

import threading

import numpy as np
import numpy.typing as npt


class Counter:
    """A number that only grows. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._value = 0
        self._native: list[npt.NDArray[np.int64]] = []

    def include(self, counts: npt.NDArray[np.int64]) -> None:
        """Add what native threads count in an array to the value."""
        self._native.append(counts)

    def add(self, amount: int) -> None:
        with self._lock:
            self._value += amount

    @property
    def value(self) -> int:
        return self._value + sum(int(counts.sum()) for counts in self._native)


class TableCounters:
    """Of one table."""

    def __init__(self) -> None:
        self.lookups = Counter()
        self.rows = Counter()
        self.rows_advised = Counter()
        self.read_errors = Counter()


class PrefetchCounters:
    """Of one prefetcher."""

    def __init__(self) -> None:
        self.accepted = Counter()
        self.dropped = Counter()
        self.cancelled = Counter()
        self.rows = Counter()
        self.pages = Counter()
        self.failures = Counter()
        self.parked = Counter()
