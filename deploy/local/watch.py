"""Follows the services and says what changes: ready, lost, restarted, failed for good."""

import signal
import threading
import time
from dataclasses import dataclass, field

from console import Console
from supervisor_process import Supervisor

from services import UNREACHABLE, Health, Service

POLL_S = 0.25
# A service that dies this often before it was ever ready will not get better by itself.
MAX_DEATHS_BEFORE_READY = 3
# How often the numbers of one and the same trouble are said again.
REPEAT_S = 10.0


class ServiceFailed(Exception):
    """A service cannot be started; its text is one line."""


@dataclass
class _Seen:
    """What was last said about a service."""

    health: Health = UNREACHABLE
    said: Health = UNREACHABLE
    said_s: float = 0.0
    pid: int = 0
    deaths: int = 0
    was_ready: bool = False


@dataclass
class Watch:
    supervisor: Supervisor
    services: list[Service]
    console: Console
    _seen: dict[str, _Seen] = field(default_factory=dict)
    _stop: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._seen = {service.name: _Seen() for service in self.services}
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda *_: self._on_signal())

    def _on_signal(self) -> None:
        """The first signal stops in order, the second at once."""
        if self._stop.is_set():
            self.supervisor.kill()
        self._stop.set()

    def until_ready(self) -> bool:
        """Whether all services became ready before the user gave up. Raises ServiceFailed."""
        while not self._stop.wait(POLL_S):
            self._look()
            if all(seen.health.ready for seen in self._seen.values()):
                return True
        return False

    def until_stopped(self) -> None:
        """Return on Ctrl-C, SIGTERM or SIGHUP. Raises ServiceFailed."""
        while not self._stop.wait(POLL_S):
            self._look()

    def _look(self) -> None:
        if not self.supervisor.alive():
            raise ServiceFailed("supervisord ended by itself: see supervisord.log in the log folder")
        processes = self.supervisor.processes()
        for service in self.services:
            info = processes.get(service.name)
            if info is not None:
                self._look_at_process(service.name, info["pid"], info["statename"])
            self._look_at_health(service)

    def _look_at_process(self, name: str, pid: int, state: str) -> None:
        seen = self._seen[name]
        if seen.pid and pid != seen.pid:
            seen.deaths += 1
            self.console.line(f"{name}: died, and is started again" if seen.was_ready else f"{name}: died")
        seen.pid = pid
        failed = not seen.was_ready and seen.deaths >= MAX_DEATHS_BEFORE_READY
        if state == "FATAL" or failed:
            raise ServiceFailed(f"{name} does not start; its last line: {self.supervisor.last_words(name)}")

    def _look_at_health(self, service: Service) -> None:
        seen, health = self._seen[service.name], service.health()
        if health == UNREACHABLE and not seen.was_ready:
            return  # busy starting
        repeated = health.kind == seen.said.kind and time.monotonic() - seen.said_s < REPEAT_S
        if health != seen.said and not repeated:
            reasons = f" ({'; '.join(health.reasons)})" if health.reasons else ""
            self.console.line(f"{service.name}: {health.state}{reasons}")
            seen.said, seen.said_s = health, time.monotonic()
        seen.health = health
        if health.ready:
            seen.was_ready, seen.deaths = True, 0
