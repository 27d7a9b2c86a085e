"""The HTTP application: routes, and what holds for all of them."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ple_inference.health import Health
from ple_inference.metrics import Metrics
from ple_inference.operations import operation_routes
from ple_inference.reference.api.chat import complete_chat
from ple_inference.reference.api.completions import complete_text
from ple_inference.reference.api.errors import ApiError, bad_request, install_error_handlers, unavailable
from ple_inference.reference.api.generation import ClientGoneError
from ple_inference.reference.api.parameters import (
    ChatBody,
    CompletionBody,
    GenerationBody,
    TokenizeBody,
    parse_body,
)
from ple_inference.reference.api.prompts import chat_prompt, text_prompt
from ple_inference.reference.service import Service

Body = TypeVar("Body", bound=GenerationBody)

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
# Capacity is told in blocks; this engine has none and counts tokens in pieces of this size.
_TOKENS_PER_BLOCK = 256
# nginx's status for a client that hung up: nobody reads it.
_CLIENT_CLOSED = 499


class Api:
    """The routes' state."""

    def __init__(self, service: Service, health: Health, metrics: Metrics) -> None:
        self.service, self.settings = service, service.settings
        self.health, self.metrics = health, metrics
        self.created = int(time.time())

    def ready_service(self) -> Service:
        """Raises ApiError while stopping."""
        if not self.health.serving:
            raise unavailable(f"the service is {self.health.report()['state']}", "not_ready")
        return self.service

    def check_model(self, name: str) -> None:
        if name and name != self.settings.model_name:
            raise ApiError(404, f"The model `{name}` does not exist.", param="model", code="model_not_found")

    async def read(self, request: Request) -> bytes:
        """The body, at most max_body_bytes of it. Raises ApiError."""
        kind = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, f"content-type {kind} is not application/json", code="unsupported_media_type")
        pieces, size = [], 0
        async for piece in request.stream():
            size += len(piece)
            if size > self.settings.max_body_bytes:
                limit = self.settings.max_body_bytes
                raise ApiError(413, f"the body is longer than {limit} bytes", code="request_too_large")
            pieces.append(piece)
        return b"".join(pieces)

    async def generate(
        self,
        request: Request,
        kind: type[Body],
        complete: Callable[[Service, Metrics, Body, Request], Awaitable[Response]],
    ) -> Response:
        service = self.ready_service()
        body = parse_body(await self.read(request), kind)
        self.check_model(body.model)
        if body.n > self.settings.max_num_seqs:
            raise bad_request(f"n is {body.n}; at most {self.settings.max_num_seqs}", "n")
        try:
            return await complete(service, self.metrics, body, request)
        except ClientGoneError:
            return Response(status_code=_CLIENT_CLOSED)


def create_app(api: Api) -> ASGIApp:
    """The application over `api`."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    install_error_handlers(app)
    _add_completions(app, api)
    _add_models(app, api)
    app.router.routes.extend(operation_routes(api.health, api.metrics, lambda: api.service.engine.alive))
    return _RequestIds(app)


def _add_completions(app: FastAPI, api: Api) -> None:
    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await api.generate(request, ChatBody, complete_chat)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await api.generate(request, CompletionBody, complete_text)

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        service = api.ready_service()
        body = parse_body(await api.read(request), TokenizeBody)
        api.check_model(body.model)
        if body.messages is not None:
            prompt, _ = await chat_prompt(service, body.messages, body.tools, body.chat_template_kwargs)
        elif body.prompt is not None:
            prompt = text_prompt(service, body.prompt)
        else:
            raise bad_request("prompt or messages is needed", "prompt")
        answer = {"count": len(prompt.tokens), "max_model_len": service.max_model_len}
        return JSONResponse(answer | {"tokens": prompt.tokens})


def _add_models(app: FastAPI, api: Api) -> None:
    def describe() -> dict[str, Any]:
        return {
            "id": api.settings.model_name,
            "object": "model",
            "created": api.created,
            "owned_by": "triplex",
            "max_model_len": api.service.max_model_len,
        }

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [describe()]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        api.check_model(name)
        return JSONResponse(describe())

    @app.get("/v1/triplex/capacity")
    async def capacity() -> Response:
        service = api.service
        per_sequence = -(-service.max_model_len // _TOKENS_PER_BLOCK)
        return JSONResponse(
            {
                "engine": "reference",
                "model": api.settings.model_name,
                "num_blocks": per_sequence * api.settings.max_num_seqs,
                "fixed_blocks_per_request": 0,
                "tokens_per_block": _TOKENS_PER_BLOCK,
                "max_model_len": service.max_model_len,
                "max_num_seqs": api.settings.max_num_seqs,
                "source": "max_num_seqs sequences of max_model_len: this engine has no block pool",
            }
        )

    @app.get("/v1/triplex/overrides")
    async def overrides() -> Response:
        return JSONResponse([])


class _RequestIds:
    """Gives every response an x-request-id: the client's own where it is a sane one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        name = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", name.encode())]
            await send(message)

        await self._app(scope, receive, send_with_id)
