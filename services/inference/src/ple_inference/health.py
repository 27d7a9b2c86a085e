"""What the service says of itself to supervisors and to the gateway."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Literal

State = Literal["starting", "ready", "degraded", "stopping"]


class Health:
    """State, reasons and since when. Thread-safe.

    `add_check` takes what is asked at every report: a function that returns a reason or None.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._phase: Literal["starting", "ready", "stopping"] = "starting"
        self._phase_reason = "loading"
        self._checks: list[Callable[[], str | None]] = []
        self._reported: State = "starting"
        self._since = datetime.now(UTC)

    def starting(self, reason: str) -> None:
        self._set("starting", reason)

    def ready(self) -> None:
        self._set("ready", "")

    def stopping(self) -> None:
        self._set("stopping", "draining")

    def add_check(self, check: Callable[[], str | None]) -> None:
        self._checks.append(check)

    def _set(self, phase: Literal["starting", "ready", "stopping"], reason: str) -> None:
        with self._lock:
            if self._phase != "stopping":
                self._phase, self._phase_reason = phase, reason

    def report(self) -> dict[str, Any]:
        """{"state", "reasons", "since"} as every service of Triplex gives it."""
        with self._lock:
            state, reasons = self._state()
            if state != self._reported:
                self._reported, self._since = state, datetime.now(UTC)
            return {
                "state": state,
                "reasons": reasons,
                "since": self._since.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            }

    def _state(self) -> tuple[State, list[str]]:
        if self._phase != "ready":
            return self._phase, [self._phase_reason]
        reasons = [reason for check in self._checks if (reason := check())]
        return ("degraded" if reasons else "ready"), reasons

    @property
    def serving(self) -> bool:
        """Whether requests are taken: also when degraded."""
        with self._lock:
            return self._phase == "ready"
