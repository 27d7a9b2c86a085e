"""Whether the gateway can serve, from the states of the engine and of the table daemon."""

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ple_gateway.daemon_watch import AWAY, DaemonWatch
from ple_gateway.engine import Engine
from ple_gateway.engine_watch import EngineState, EngineWatch, keep_looking
from ple_gateway.errors import RESTART_RETRY_AFTER_S
from ple_gateway.gate import Gate
from ple_gateway.metrics import Metrics
from ple_gateway.models import ModelCatalogue
from ple_gateway.settings import Settings

_LOG = logging.getLogger(__name__)
_TABLE_RETRY_AFTER_S = 15
_STALL_RETRY_AFTER_S = 60


class Health:
    """Opens and closes the gate; is the state that `/readyz` shows: starting, ready, degraded or stopping."""

    def __init__(
        self, settings: Settings, engine: Engine, models: ModelCatalogue, gate: Gate, metrics: Metrics
    ) -> None:
        self._settings = settings
        self._gate = gate
        self._metrics = metrics
        self._random = random.Random()  # noqa: S311 jitter is no secret
        self.engine = EngineWatch(settings, engine, models, gate, self._judge)
        self.daemon = DaemonWatch(settings.daemon_url, self._judge)
        gate.on_unreachable = self.engine.note_unreachable
        self._table_lost_s: float | None = None
        self.state = "starting"
        self.reasons = ["engine: not asked yet"]
        self.since = _now()

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Look at both, each at its own pace, within the block."""
        looks = [
            asyncio.create_task(keep_looking(self.engine.look, lambda: self.engine.woken(self._pause_s()))),
            asyncio.create_task(keep_looking(self.daemon.look, lambda: asyncio.sleep(self._pause_s()))),
        ]
        try:
            yield
        finally:
            for look in looks:
                look.cancel()
            await asyncio.gather(*looks, return_exceptions=True)
            await self.daemon.aclose()

    def _pause_s(self) -> float:
        return self._settings.probe_interval_s * self._random.uniform(0.8, 1.2)

    def stop(self) -> None:
        """Report `stopping` from now on."""
        self._change("stopping", ["shutting down"])

    @property
    def table(self) -> str:
        """The daemon's state: its own word where it is asked, else what the engine reports of it."""
        if self.engine.waiting_for_table:
            return self.daemon.state if self.daemon.state in AWAY else "down"
        if self.daemon.is_asked:
            return self.daemon.state
        return "ready" if self.engine.state.serves else "unknown"

    @property
    def serving(self) -> bool:
        """Whether requests are served: also while the daemon restarts, for as long as they are held."""
        lost_s = 0.0 if self._table_lost_s is None else time.monotonic() - self._table_lost_s
        return self.engine.state.serves and (not lost_s or lost_s < self._settings.hold_timeout_s)

    def _judge(self) -> None:
        """Take in what was seen: the gate, the metrics, the state."""
        if self.table not in AWAY:
            self._table_lost_s = None
        elif self._table_lost_s is None:
            self._table_lost_s = time.monotonic()
        self._move_gate()
        self._metrics.engine_up.set(self.engine.state.serves)
        for state in EngineState:
            self._metrics.engine_state.labels(state.value).set(state is self.engine.state)
        reasons = [f"engine: {reason}" for reason in self.engine.reasons]
        reasons += [f"table: {reason}" for reason in self.daemon.reasons]
        self._change(("degraded" if reasons else "ready") if self.serving else "starting", reasons)

    def _move_gate(self) -> None:
        state = self.engine.state
        if state.serves and self.table not in AWAY:
            self._gate.open()
        elif state is EngineState.STALLED:
            self._gate.close("The engine makes no progress.", _STALL_RETRY_AFTER_S, hold=False)
        elif state.serves:
            text = "The table daemon is away; it may be restarting."
            self._gate.close(text, _TABLE_RETRY_AFTER_S, hold=self.serving)
        elif state not in {EngineState.UNKNOWN, EngineState.WARMING}:  # these pass in a moment
            self._gate.close(f"The engine is {state.value}; it may be restarting.", RESTART_RETRY_AFTER_S)

    def _change(self, state: str, reasons: list[str]) -> None:
        if self.state == "stopping" or (self.state, self.reasons) == (state, reasons):
            return
        if self.state != state:
            self.since = _now()
        self.state, self.reasons = state, reasons
        _LOG.info(
            "health changed state=%s engine=%s table=%s reasons=%s",
            state,
            self.engine.state.value,
            self.table,
            "; ".join(reasons) or "-",
        )

    async def livez(self, _request: Request) -> Response:
        """GET /livez: answering at all is what it says."""
        return self._answer(200)

    async def readyz(self, _request: Request) -> Response:
        """GET /readyz and /health: 200 while requests can be served."""
        return self._answer(200 if self.serving and self.state != "stopping" else 503)

    def _answer(self, status: int) -> Response:
        content = {
            "state": self.state,
            "reasons": self.reasons,
            "since": self.since,
            "dependencies": {"engine": self.engine.state.value, "table": self.table},
        }
        return Response(msgspec.json.encode(content), status, media_type="application/json")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
