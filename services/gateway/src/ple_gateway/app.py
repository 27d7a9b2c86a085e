"""The application: which path is answered by what, and what starts and stops with it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response

from ple_gateway.anthropic_messages import CountTokensDialect, MessagesDialect
from ple_gateway.auth import ApiKeyMiddleware
from ple_gateway.body import BodyReader
from ple_gateway.cors import CorsMiddleware, PreflightMiddleware
from ple_gateway.dialect import CompletionDialect, Speak
from ple_gateway.engine import Engine
from ple_gateway.errors import GatewayError
from ple_gateway.estimate import Estimator
from ple_gateway.exchange import ExchangeMiddleware
from ple_gateway.gate import Gate
from ple_gateway.generation import Generation
from ple_gateway.health import Health
from ple_gateway.images.pipeline import ImagePipeline
from ple_gateway.metrics import Metrics
from ple_gateway.models import ModelCatalogue
from ple_gateway.openai_responses import ResponsesDialect
from ple_gateway.openapi import openapi_document
from ple_gateway.preparation import Preparation
from ple_gateway.recent import Recent
from ple_gateway.schemas import Schemas
from ple_gateway.settings import Settings
from ple_gateway.stages import StageClocks
from ple_gateway.status import StatusPage
from ple_gateway.tokenization import Tokenization


class Gateway:
    """Everything that lives as long as the application."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self.clocks = StageClocks(settings.total_timeout_s)
        self.engine = Engine(settings, self.metrics)
        self.models = ModelCatalogue(self.engine)
        self.gate = Gate(settings, self.metrics)
        self.health = Health(settings, self.engine, self.models, self.gate, self.metrics)
        self.recent = Recent()
        self.status = StatusPage(self.gate, self.health, self.recent)
        self.bodies = BodyReader(settings)
        self.images = ImagePipeline(settings, self.metrics)
        self.schemas = Schemas(settings)
        estimator = Estimator(
            self.engine,
            lambda: self.gate.capacity,
            reserved_answer_tokens=settings.reserved_answer_tokens,
            image_max_px=settings.image_max_px,
        )
        self.preparation = Preparation(
            settings, self.models, self.images, self.schemas, estimator, self.metrics
        )

    @asynccontextmanager
    async def running(self, _app: FastAPI) -> AsyncIterator[None]:
        """Probe the engine while the application runs; close what was opened when it stops."""
        try:
            async with self.health.watching():
                yield
        finally:
            await self.images.aclose()
            await self.schemas.aclose()
            await self.engine.aclose()

    async def drain(self) -> None:
        """Report `stopping`, let running requests go on for `drain_timeout_s`, then end them in order."""
        self.health.stop()
        await asyncio.sleep(self.settings.drain_timeout_s)
        self.clocks.expire_all()

    async def show_metrics(self, _request: Request) -> Response:
        """GET /metrics."""
        return Response(generate_latest(self.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def show_openapi(self, _request: Request) -> Response:
        """GET /openapi.json."""
        document = openapi_document(self.settings.max_choices)
        return Response(msgspec.json.encode(document), media_type="application/json")


def create_app(settings: Settings) -> FastAPI:
    """Build the gateway. `app.state.gateway` is the Gateway, for the server that drains it."""
    gateway = Gateway(settings)
    endpoints = _endpoints(gateway)
    app = FastAPI(
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        lifespan=gateway.running,
        exception_handlers={HTTPException: _routing_error},
        middleware=[
            Middleware(CorsMiddleware, origins=settings.origins()),
            Middleware(
                ExchangeMiddleware, metrics=gateway.metrics, recent=gateway.recent, routes=[*endpoints]
            ),
            Middleware(PreflightMiddleware, origins=settings.origins()),
            Middleware(ApiKeyMiddleware, keys=settings.keys(), metrics_need_key=settings.metrics_need_key()),
        ],
    )
    for path, (method, endpoint) in endpoints.items():
        app.add_route(path, endpoint, methods=[method])
    app.state.gateway = gateway
    return app


def _endpoints(gateway: Gateway) -> dict[str, tuple[str, Any]]:
    """List all that is served: nothing else reaches the engine."""

    def generation(speak: Speak) -> Generation:
        return Generation(
            gateway.settings,
            gateway.bodies,
            gateway.preparation,
            gateway.gate,
            gateway.engine,
            gateway.clocks,
            gateway.metrics,
            speak,
        )

    def tokenization(speak: Speak) -> Tokenization:
        return Tokenization(
            gateway.bodies, gateway.preparation, gateway.gate, gateway.engine, gateway.clocks, speak
        )

    return {
        "/v1/chat/completions": ("POST", generation(CompletionDialect)),
        "/v1/completions": ("POST", generation(CompletionDialect)),
        "/v1/responses": ("POST", generation(ResponsesDialect)),
        "/v1/messages": ("POST", generation(MessagesDialect)),
        "/v1/messages/count_tokens": ("POST", tokenization(CountTokensDialect)),
        "/v1/models": ("GET", gateway.models.list_models),
        "/v1/models/{model:path}": ("GET", gateway.models.get_model),
        "/tokenize": ("POST", tokenization(CompletionDialect)),
        "/livez": ("GET", gateway.health.livez),
        "/readyz": ("GET", gateway.health.readyz),
        "/health": ("GET", gateway.health.readyz),
        "/metrics": ("GET", gateway.show_metrics),
        "/": ("GET", gateway.status.show_page),
        "/status.json": ("GET", gateway.status.show_figures),
        "/openapi.json": ("GET", gateway.show_openapi),
    }


async def _routing_error(_request: Request, exc: Exception) -> Response:
    """Turn the router's 404 and 405 into ours."""
    assert isinstance(exc, HTTPException)
    texts = {404: "There is nothing at this path.", 405: "This path does not take this method."}
    raise GatewayError(exc.status_code, texts.get(exc.status_code, exc.detail), headers=exc.headers) from exc
