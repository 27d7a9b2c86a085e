"""What vLLM's API server serves beside its own, by --middleware.

A middleware is the only way in: naming an endpoint plugin in VLLM_PLUGINS would leave general plugins out. It
answers nothing itself. It adds routes, so that vLLM's own middlewares, its API keys first, hold for them.
"""

from __future__ import annotations

import asyncio
import contextlib
from functools import cache
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ple_inference.health import Health
from ple_inference.vllm_engine.capacity import capacity
from ple_inference.vllm_engine.progress import STALL_S, Progress
from ple_inference.vllm_plugin.proof import report
from ple_inference.vllm_plugin.switches import triplex_options

_LOOK_S = 1.0


class TriplexMiddleware:
    """Adds /livez, /readyz, /health (in place of vLLM's), /v1/triplex/capacity and /v1/triplex/overrides."""

    def __init__(self, app: ASGIApp, stall_s: float = STALL_S) -> None:
        self._app = app
        self._stall_s = stall_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return
        # By now vLLM has an engine and has put it where its own routes find it.
        server = scope["app"]
        signs = AsyncLlmSigns(server.state.engine_client)
        progress = Progress(signs, _wait_file(server.state.vllm_config), stall_s=self._stall_s)
        server.router.routes[:0] = _routes(server.state, progress)
        looking = asyncio.create_task(_keep_looking(progress))
        try:
            await self._app(scope, receive, send)
        finally:
            looking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await looking
            progress.close()


class AsyncLlmSigns:
    """Reads vLLM's AsyncLLM."""

    def __init__(self, engine_client: Any) -> None:
        self._client = engine_client

    @property
    def dead(self) -> bool:
        return bool(self._client.errored)

    @property
    def unfinished(self) -> int:
        return int(self._client.output_processor.get_num_unfinished_requests())


async def _keep_looking(progress: Progress) -> None:
    while True:
        progress.look()
        await asyncio.sleep(_LOOK_S)


def _wait_file(vllm_config: Any) -> Path | None:
    name = triplex_options(vllm_config.additional_config).get("wait_file")
    return Path(name) if name else None


def _routes(state: Any, progress: Progress) -> list[Route]:
    health = Health()
    health.add_check(lambda: "waiting_for_table" if progress.waiting_for_table else None)
    health.add_check(lambda: progress.trouble)
    health.ready()
    model = (state.args.served_model_name or [state.args.model])[0]
    told = cache(lambda: capacity(state.vllm_config, model))

    async def healthy(_: Request) -> Response:
        return JSONResponse(health.report(), 503 if progress.trouble else 200)

    # In threads: both read or compute for a moment.
    def held(_: Request) -> Response:
        return JSONResponse(told())

    def overrides(_: Request) -> Response:
        return JSONResponse(report(state.vllm_config.additional_config))

    return [
        *(Route(path, healthy) for path in ("/livez", "/readyz", "/health")),
        Route("/v1/triplex/capacity", held),
        Route("/v1/triplex/overrides", overrides),
    ]
