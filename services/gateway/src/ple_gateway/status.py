"""The status page at `/`, and the figures that it shows at `/status.json`."""

import base64
import hashlib
import re
import time
from importlib import resources
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ple_gateway import __version__
from ple_gateway.gate import Gate
from ple_gateway.health import Health
from ple_gateway.recent import Recent
from ple_gateway.scheduler import Lane

_INLINE = re.compile(rb"<(script|style)>(.*?)</\1>", re.DOTALL)
_SHOWN_ERRORS = 12


class StatusPage:
    """One file without external parts; its policy lets it run its own script and ask this gateway only."""

    def __init__(self, gate: Gate, health: Health, recent: Recent) -> None:
        self._gate = gate
        self._health = health
        self._recent = recent
        self._started_s = time.monotonic()
        self._page = resources.files("ple_gateway").joinpath("status.html").read_bytes()
        self._headers = {
            "content-security-policy": _policy(self._page),
            "cache-control": "no-cache",
            "referrer-policy": "no-referrer",
            "x-content-type-options": "nosniff",
        }

    async def show_page(self, _request: Request) -> Response:
        """GET /."""
        return Response(self._page, headers=self._headers, media_type="text/html; charset=utf-8")

    async def show_figures(self, _request: Request) -> Response:
        """GET /status.json."""
        body = msgspec.json.encode(self.figures())
        return Response(body, headers={"cache-control": "no-store"}, media_type="application/json")

    def figures(self) -> dict[str, Any]:
        """Return all that the page shows; null is unknown."""
        capacity, waits = self._gate.capacity, self._recent.first_token_s()
        return {
            "gateway": {
                "state": self._health.state,
                "reasons": self._health.reasons if self._health.state == "stopping" else [],
                "since": self._health.since,
                "version": __version__,
                "uptime_s": round(time.monotonic() - self._started_s),
            },
            "engine": self._engine(),
            "table": self._table(),
            "running": self._gate.running,
            "queued": {lane.label: self._gate.queued(lane) for lane in Lane},
            "blocks": {"used": self._gate.used_blocks, "budget": capacity.budget_blocks}
            if capacity
            else None,
            "first_token_s": {"median": waits[0], "p95": waits[1]} if waits else None,
            "errors": [
                {"at_s": round(error.at_s), "route": error.route, "status": error.status, "code": error.code}
                for error in self._recent.errors[:_SHOWN_ERRORS]
            ],
        }

    def _engine(self) -> dict[str, Any]:
        engine = self._health.engine
        return {
            "state": engine.state.value,
            "reasons": engine.reasons,
            "running": engine.sample.running if engine.sample else None,
            "tokens_per_s": round(engine.tokens_per_s, 1) if engine.sample else None,
        }

    def _table(self) -> dict[str, Any]:
        daemon = self._health.daemon
        return {
            "state": self._health.table,
            "reasons": daemon.reasons,
            "asked": daemon.is_asked,
            "cold_reads_per_s": daemon.cold_reads_per_s,
            "drive_tail_s": daemon.figures.get("ple_daemon_drive_read_max_seconds"),
            "resident_share": daemon.figures.get("ple_daemon_resident_share"),
        }


def _policy(page: bytes) -> str:
    """Return the content security policy that allows the page's own inline parts, by their hashes."""
    allowed: dict[str, str] = {}
    for kind, text in _INLINE.findall(page):
        digest = base64.b64encode(hashlib.sha256(text).digest()).decode()
        allowed[kind.decode()] = f"'sha256-{digest}'"
    return (
        f"default-src 'none'; script-src {allowed['script']}; style-src {allowed['style']}; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
