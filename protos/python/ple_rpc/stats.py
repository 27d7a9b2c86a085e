"""What a client did, for the metrics of the service that holds it."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ClientStats:
    """A snapshot of a client's counters."""

    lookups: int = 0
    """Lookups that returned rows."""
    lookups_in_flight: int = 0
    """Lookups that wait for an answer now."""
    lookups_repeated: int = 0
    """Times a lookup that had reached a daemon had to be sent again: it died, hung or drained."""
    lookups_failed: int = 0
    """Lookups that ended in an exception."""
    reconnects: int = 0
    """Connections after the first one."""
    prefetches_sent: int = 0
    prefetches_dropped: int = 0
    """Hints that were not sent, or that the daemon dropped."""
    waiting_since: float | None = None
    """Monotonic time since when some lookup has had no daemon to talk to; None when all is well."""


@dataclass
class StatsRecorder:
    """The counters behind ClientStats. Thread-safe."""

    _counts: dict[str, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _waits: dict[int, float] = field(default_factory=dict)

    def snapshot(self) -> ClientStats:
        with self._lock:
            return ClientStats(**self._counts, waiting_since=min(self._waits.values(), default=None))

    def add(self, **counts: int) -> None:
        """Add to counters by name."""
        with self._lock:
            for name, count in counts.items():
                self._counts[name] = self._counts.get(name, 0) + count

    @contextmanager
    def lookup(self) -> Iterator[None]:
        """Count the lookup of the body: in flight, then done or failed. Its wait ends with it."""
        self.add(lookups_in_flight=1)
        try:
            yield
        except BaseException:
            self.add(lookups_in_flight=-1, lookups_failed=1)
            raise
        finally:
            if self._waits:
                self._wait_ended()
        self.add(lookups_in_flight=-1, lookups=1)

    def wait_began(self) -> None:
        """This thread's lookup has no daemon to talk to."""
        with self._lock:
            self._waits.setdefault(threading.get_ident(), time.monotonic())

    def _wait_ended(self) -> None:
        with self._lock:
            self._waits.pop(threading.get_ident(), None)
