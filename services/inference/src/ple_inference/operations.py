"""Health and metrics over HTTP, the same whatever engine serves."""

from __future__ import annotations

from collections.abc import Callable

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ple_inference.health import Health
from ple_inference.metrics import Metrics


def operation_routes(health: Health, metrics: Metrics, alive: Callable[[], bool]) -> list[Route]:
    """/livez, /readyz, /health, /metrics. `alive` says whether what computes still runs."""

    async def livez(_: Request) -> Response:
        return JSONResponse(health.report(), 200 if alive() else 503)

    async def readyz(_: Request) -> Response:
        return JSONResponse(health.report(), 200 if health.serving else 503)

    async def prometheus(_: Request) -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return [
        Route("/livez", livez),
        Route("/readyz", readyz),
        Route("/health", readyz),
        Route("/metrics", prometheus),
    ]


def starting_app(health: Health, metrics: Metrics) -> Starlette:
    """What answers while the model loads: health, and 503 in OpenAI's shape for all else."""

    async def not_yet(_: Request) -> Response:
        error = {
            "message": f"the service is {health.report()['state']}",
            "type": "server_error",
            "param": None,
            "code": "not_ready",
        }
        return JSONResponse({"error": error}, 503, {"retry-after": "5"})

    methods = ["GET", "POST"]
    routes = [
        *operation_routes(health, metrics, lambda: True),
        Route("/{path:path}", not_yet, methods=methods),
    ]
    return Starlette(routes=routes)
