"""Whether the gateway can serve: what the engine says of itself, asked every two seconds."""

import asyncio
import logging
import random
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import httpx2
import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ple_gateway.engine import Engine
from ple_gateway.metrics import Metrics

_LOG = logging.getLogger(__name__)
_WAITING_FOR_TABLE = "waiting_for_table"


class Health:
    """The state that `/readyz` shows: starting, ready, degraded or stopping, with reasons and since when."""

    def __init__(
        self, engine: Engine, metrics: Metrics, on_ready: Callable[[], Any], interval_s: float
    ) -> None:
        self._engine = engine
        self._metrics = metrics
        self._on_ready = on_ready
        self._interval_s = interval_s
        self._random = random.Random()  # noqa: S311 jitter is no secret
        self._serving = False
        self._dependencies = {"engine": "unknown", "table": "unknown"}
        self._state = "starting"
        self._reasons = ["engine: not asked yet"]
        self._since = _now()

    async def watch(self) -> None:
        """Probe the engine until cancelled; a failed probe is a state, never an end."""
        while True:
            up, reasons = await self._probe()
            if up and not self._serving:
                await self._on_ready()
            self._note(up, reasons)
            await asyncio.sleep(self._interval_s * self._random.uniform(0.8, 1.2))

    def stop(self) -> None:
        """Report `stopping` from now on."""
        self._change("stopping", ["shutting down"])

    async def _probe(self) -> tuple[bool, list[str]]:
        try:
            health = await self._engine.get("/health")
            ready = await self._engine.get("/readyz")
        except httpx2.TransportError as exc:
            return False, [f"cannot be reached ({type(exc).__name__})"]
        reasons = _reasons(ready)
        if health.status_code != 200:
            return False, reasons or [f"/health answers {health.status_code}"]
        return True, reasons

    def _note(self, up: bool, reasons: list[str]) -> None:
        self._serving = up
        self._metrics.engine_up.set(up)
        self._dependencies["engine"] = "ready" if up else "down"
        waiting = any(_WAITING_FOR_TABLE in reason for reason in reasons)
        self._dependencies["table"] = "down" if waiting else "ready" if up else "unknown"
        state = ("degraded" if reasons else "ready") if up else "starting"
        self._change(state, [f"engine: {reason}" for reason in reasons])

    def _change(self, state: str, reasons: list[str]) -> None:
        if self._state == "stopping" or (self._state, self._reasons) == (state, reasons):
            return
        if self._state != state:
            self._since = _now()
        self._state, self._reasons = state, reasons
        _LOG.info("health changed state=%s reasons=%s", state, "; ".join(reasons) or "-")

    async def livez(self, _request: Request) -> Response:
        """GET /livez: answering at all is what it says."""
        return self._answer(200)

    async def readyz(self, _request: Request) -> Response:
        """GET /readyz and /health: 200 while requests can be served."""
        return self._answer(200 if self._serving and self._state != "stopping" else 503)

    def _answer(self, status: int) -> Response:
        content = {
            "state": self._state,
            "reasons": self._reasons,
            "since": self._since,
            "dependencies": self._dependencies,
        }
        return Response(msgspec.json.encode(content), status, media_type="application/json")


def _reasons(ready: httpx2.Response) -> list[str]:
    """Read the reasons our inference gives in its `/readyz`; other engines have none."""
    try:
        body = msgspec.json.decode(ready.content)
    except msgspec.DecodeError:
        return []
    reasons = body.get("reasons") if isinstance(body, dict) else None
    return [str(reason)[:200] for reason in reasons[:10]] if isinstance(reasons, list) else []


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
