"""The daemon's state and why it is so, for /readyz and grpc.health.v1 alike."""

import enum
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

# The main loop beats about once a second.
_ALIVE_WITHIN_S = 10.0


class State(enum.Enum):
    """Serving states are READY and DEGRADED."""

    STARTING = "starting"
    READY = "ready"
    DEGRADED = "degraded"
    STOPPING = "stopping"


class Health:
    """Phase (starting, serving, stopping), named problems, and the main loop's heartbeat. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._phase = State.STARTING
        self._problems: dict[str, str] = {}
        self._notes: dict[str, str] = {}
        self._beat = clock()
        self._since = datetime.now(UTC)

    @property
    def state(self) -> State:
        with self._lock:
            return self._state()

    @property
    def is_serving(self) -> bool:
        return self.state in (State.READY, State.DEGRADED)

    @property
    def is_alive(self) -> bool:
        """Whether the main loop turned lately; opening the table and draining have no loop."""
        return not self.is_serving or self._clock() - self._beat < _ALIVE_WITHIN_S

    def beat(self) -> None:
        self._beat = self._clock()

    def enter(self, phase: State) -> None:
        """Move to READY or STOPPING; problems turn READY into DEGRADED by themselves."""
        self.beat()
        self._change(lambda: setattr(self, "_phase", phase))

    def note(self, key: str, text: str) -> None:
        """A reason that is shown and does not degrade, such as a fallback in use."""
        self._change(lambda: self._notes.__setitem__(key, text))

    def report(self, key: str, problem: str) -> bool:
        """A reason that degrades; True when it is news."""
        if self._problems.get(key) == problem:
            return False
        self._change(lambda: self._problems.__setitem__(key, problem))
        return True

    def clear(self, key: str) -> bool:
        """A problem that is over; True when there was one."""
        if key not in self._problems:
            return False
        self._change(lambda: self._problems.pop(key, None))
        return True

    def as_json(self) -> dict[str, Any]:
        with self._lock:
            return {
                "state": self._state().value,
                "reasons": [*self._problems.values(), *self._notes.values()],
                "since": self._since.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            }

    def _state(self) -> State:
        return State.DEGRADED if self._phase is State.READY and self._problems else self._phase

    def _change(self, change: Callable[[], object]) -> None:
        with self._lock:
            before = self._state()
            change()
            if self._state() is not before:
                self._since = datetime.now(UTC)
