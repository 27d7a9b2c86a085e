"""Puts the parts together, runs them until a signal, and takes them apart in order."""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from ple_daemon.activity import Activity
from ple_daemon.doorbell import Doorbell, RegionTerms
from ple_daemon.drive_tail import DriveTail
from ple_daemon.errors import EndpointError
from ple_daemon.gather import Advice
from ple_daemon.health import Health, State
from ple_daemon.metrics import BackgroundMetrics, DriveCollector, LookupMetrics, TableCollector
from ple_daemon.prefetch import Prefetcher
from ple_daemon.remote_endpoint import remote_endpoint
from ple_daemon.residency import ResidentSample
from ple_daemon.run_directory import RunDirectory
from ple_daemon.server import RpcServer
from ple_daemon.servicer import Offer, TableServicer, limits, session_quotas
from ple_daemon.sessions import Event, Sessions
from ple_daemon.settings import Settings
from ple_daemon.shm_board import MAX_SEATS
from ple_daemon.shm_metrics import ShmCollector
from ple_daemon.shm_plane import ShmPlane
from ple_daemon.source import open_table
from ple_daemon.table import Table
from ple_daemon.warm_up import warm_up
from ple_daemon.web import WebServer, create_app
from ple_rpc.table.v1.table_service_pb2 import Degraded, Draining

_log = logging.getLogger(__name__)

_BEAT_S = 1.0
_STOP_S = 2.0


def serve(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT, then drain. Raises DaemonError when it cannot start."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    _log.info("starting %s", " ".join(f"{name}={value}" for name, value in settings.model_dump().items()))
    with ExitStack() as stack:
        Daemon(settings, stack).run(stop)


class Daemon:
    """One run of the service. What it opens is closed by `stack`, newest first."""

    def __init__(self, settings: Settings, stack: ExitStack) -> None:
        started_s = time.monotonic()
        self._settings = settings
        self._health = Health()
        self._drive_is_slow = False
        self._instance_id = os.urandom(16)
        self._details: dict[str, Any] = {"instance_id": self._instance_id.hex()}
        registry = CollectorRegistry()
        self._activity = Activity()
        remote = remote_endpoint(settings.listen, settings.tls_cert, settings.tls_key, settings.tls_client_ca)
        self._run_dir = run_dir = RunDirectory(settings.run_dir)
        stack.callback(run_dir.close)
        web = WebServer(settings.http_address)
        stack.callback(web.stop)
        web.start(create_app(self._health, registry, lambda: self._details))
        self._table = self._open_table(settings.table, stack)
        background = BackgroundMetrics(registry)
        self._prefetcher = Prefetcher(
            self._table,
            settings.max_queued_prefetches,
            settings.max_prefetches_per_session,
            background.prefetch_seconds.observe,
        )
        registry.register(TableCollector(self._table, self._prefetcher))
        self._watch_drive(registry, background)
        stack.callback(self._tail.stop, _STOP_S)
        warm_up(self._table)
        self._plane = ShmPlane(self._table)
        # An open Attach stream holds a thread: the other half is for calls.
        session_limit = min(MAX_SEATS, settings.max_concurrent_calls // 2)
        self._sessions = Sessions(self._prefetcher, self._plane.give_up, session_limit)
        registry.register(ShmCollector(self._plane, self._sessions))
        self._doorbell, offer = self._make_doorbell(run_dir)
        servicer = TableServicer(
            self._table, self._prefetcher, LookupMetrics(registry), self._activity, self._sessions, offer
        )
        self._server = RpcServer(
            servicer, run_dir, settings.max_concurrent_calls, settings.client_silence_s, remote
        )
        self._sample.take()
        self._prefetcher.start()
        self._plane.start()
        self._doorbell.start()
        self._tail.start()
        self._server.start()
        if remote is not None:
            _log.info(
                "listening address=tcp://%s port=%s mutual_tls=%s",
                remote.address, self._server.remote_port, remote.credentials is not None,
            )  # fmt: skip
        self._health.enter(State.READY)
        _log.info(
            "ready socket=%s http_port=%d start_s=%.2f",
            run_dir.socket_path, web.port, time.monotonic() - started_s,
        )  # fmt: skip

    def run(self, stop: threading.Event) -> None:
        """Beat and watch files, drive and page cache until `stop`, then drain.

        Raises EndpointError, after draining, when the socket is gone: a socket cannot be bound again, and a
        supervisor starts a new daemon in a second.
        """
        settings = self._settings
        chores = [
            _Chore(settings.watch_interval_s, self._table.watch.check),
            _Chore(settings.resident_interval_s, self._sample.take),
        ]
        beat_s = min(_BEAT_S, settings.watch_interval_s, settings.resident_interval_s)
        while not stop.wait(beat_s):
            self._health.beat()
            for chore in chores:
                chore.do_when_due()
            self._report_problems()
            if not self._run_dir.is_published():
                self._drain()
                raise EndpointError(
                    f"{self._run_dir.socket_path}: somebody removed or replaced the socket: "
                    "no client finds this daemon any more, start it again"
                )
        self._drain()

    def _open_table(self, path: Path, stack: ExitStack) -> Table:
        wanted = None if self._settings.advice == "auto" else Advice[self._settings.advice.upper()]
        table = stack.enter_context(open_table(path, wanted))
        layout, advisor = table.layout, table.advisor
        self._details |= {
            "fingerprint": table.fingerprint.hex(),
            "rows": layout.rows,
            "row_type": layout.row_type.value,
            "advice": advisor.name,
        }
        _log.info(
            "table opened path=%s rows=%d row_bytes=%d row_type=%s segments=%d fingerprint=%s",
            path, layout.rows, layout.row_bytes, layout.row_type.value, len(layout.segments),
            table.fingerprint.hex()[:16],
        )  # fmt: skip
        reason = f" ({advisor.refusal})" if advisor.refusal else ""
        _log.info("advice chosen advice=%s%s", advisor.name, reason)
        if advisor.refusal:
            self._health.note("advice", f"advice is {advisor.name}{reason}")
        return table

    def _make_doorbell(self, run_dir: RunDirectory) -> tuple[Doorbell, Offer]:
        table, prefetcher = self._table, self._prefetcher
        bounds = limits(table.layout, prefetcher.max_queued)
        quotas = session_quotas(bounds, self._settings.max_prefetches_per_session)
        terms = RegionTerms(quotas, table.layout.row_bytes, table.fingerprint, self._settings.client_gid)
        doorbell = Doorbell(run_dir, self._plane, self._sessions, terms)
        return doorbell, Offer(self._instance_id, bounds, quotas, str(doorbell.path.absolute()))

    def _watch_drive(self, registry: CollectorRegistry, background: BackgroundMetrics) -> None:
        files = sorted({segment.path for segment in self._table.layout.segments})
        self._tail = DriveTail(
            files, self._table.gate, self._settings.drive_probe_interval_s, background.drive_seconds.observe
        )
        self._sample = ResidentSample(self._table.first_address, self._table.size_bytes, files)
        registry.register(DriveCollector(self._tail, self._sample))
        if self._tail.refusal:
            _log.info("drive probe off reason=%s", self._tail.refusal)
        if not self._sample.is_known:
            _log.info("resident share unknown reason=the table belongs to another user")

    def _report_problems(self) -> None:
        errors = self._table.counters.read_errors.value
        if errors and self._health.report("read_errors", f"{errors} lookups met a read error"):
            _log.error("lookups met read errors count=%d", errors)
            self._sessions.announce(Event(degraded=Degraded(reason=f"{errors} lookups met a read error")))
        change = self._table.watch.change
        if change is not None and self._health.report("change", change):
            _log.error("table changed, lookups are refused change=%s", change)
            self._sessions.announce(Event(degraded=Degraded(reason=change)))
        self._report_drive()

    def _report_drive(self) -> None:
        problem = self._tail.problem
        if problem is None:
            if self._health.clear("drive_tail"):
                _log.info("drive answers in time again")
        elif self._health.report("drive_tail", problem) and not self._drive_is_slow:
            _log.warning("drive is slow reason=%s", problem)
        self._drive_is_slow = problem is not None

    def _drain(self) -> None:
        # The doors close before anybody hears of it.
        self._activity.close(0.0)
        self._plane.refuse()
        _log.info("draining timeout_s=%g", self._settings.drain_timeout_s)
        self._health.enter(State.STOPPING)
        self._server.refuse()
        self._sessions.announce(Event(draining=Draining(reason="the daemon is about to stop")))
        deadline_s = time.monotonic() + self._settings.drain_timeout_s
        finished = self._activity.close(self._settings.drain_timeout_s)
        finished &= self._plane.drain(max(0.0, deadline_s - time.monotonic()))
        stopped = self._prefetcher.stop(_STOP_S)
        self._server.stop()
        self._doorbell.stop(_STOP_S)
        if not self._plane.stop(_STOP_S):
            self._table.keep_mapped()
        _log.info("stopped calls_finished=%s prefetch_stopped=%s", finished, stopped)


class _Chore:
    """Something to do every so often."""

    def __init__(self, interval_s: float, do: Callable[[], object]) -> None:
        self._interval_s = interval_s
        self._do = do
        self._due_s = time.monotonic() + interval_s

    def do_when_due(self) -> None:
        if time.monotonic() >= self._due_s:
            self._do()
            self._due_s = time.monotonic() + self._interval_s
