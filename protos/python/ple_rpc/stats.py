"""What a client did, for the metrics of the service that holds it."""

import threading
import time
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
    _in_flight: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _waits: dict[int, float] = field(default_factory=dict)

    def snapshot(self) -> ClientStats:
        with self._lock:
            return ClientStats(
                **self._counts,
                lookups_in_flight=self._in_flight,
                waiting_since=min(self._waits.values(), default=None),
            )

    def add(self, **counts: int) -> None:
        """Add to counters by name."""
        with self._lock:
            for name, count in counts.items():
                self._counts[name] = self._counts.get(name, 0) + count

    def lookup(self) -> "_Counted":
        """Counts the lookup of a `with` body: in flight, then done or failed. Its wait ends with it."""
        return _Counted(self)

    def begin(self) -> None:
        """A lookup is in flight."""
        with self._lock:
            self._in_flight += 1

    def finish(self, outcome: str) -> None:
        """It no longer is, nor does this thread's lookup wait; `outcome` is the name of a counter."""
        with self._lock:
            self._in_flight -= 1
            self._counts[outcome] = self._counts.get(outcome, 0) + 1
            if self._waits:
                self._waits.pop(threading.get_ident(), None)

    def wait_began(self) -> None:
        """This thread's lookup has no daemon to talk to."""
        with self._lock:
            self._waits.setdefault(threading.get_ident(), time.monotonic())


class _Counted:
    """A class, since entering a generator's context costs as much as the rest of a lookup's counting."""

    __slots__ = ("_recorder",)

    def __init__(self, recorder: StatsRecorder) -> None:
        self._recorder = recorder

    def __enter__(self) -> None:
        self._recorder.begin()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._recorder.finish("lookups" if kind is None else "lookups_failed")
