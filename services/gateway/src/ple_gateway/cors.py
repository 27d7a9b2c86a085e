"""Browsers: which other origins' pages may read the answers."""

from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ple_gateway.errors import GatewayError

_EXPOSED = (
    "openai-processing-ms, request-id, retry-after, x-request-id, x-should-retry, "
    "x-triplex-schema-lowered, x-triplex-schema-slow"
)
_MAX_AGE_S = 600


class CorsMiddleware:
    """Marks every answer, errors too, for pages of the listed origins ("*": of all). No cookies."""

    def __init__(self, app: ASGIApp, origins: Collection[str]) -> None:
        self._app = app
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        origin = _origin(scope)
        if not _allows(self._origins, origin):
            await self._app(scope, receive, send)
            return

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["access-control-allow-origin"] = origin
                headers["access-control-expose-headers"] = _EXPOSED
                headers.add_vary_header("origin")
            await send(message)

        await self._app(scope, receive, marked)


class PreflightMiddleware:
    """Answers preflights, which carry no key, before keys are asked for."""

    def __init__(self, app: ASGIApp, origins: Collection[str]) -> None:
        self._app = app
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers({})
        if scope.get("method") != "OPTIONS" or "access-control-request-method" not in headers:
            await self._app(scope, receive, send)
            return
        if not _allows(self._origins, _origin(scope)):
            raise GatewayError(403, "Pages of this origin may not use this API.", code="origin_not_allowed")
        allowed = {
            "access-control-allow-methods": "GET, POST",
            "access-control-allow-headers": headers.get("access-control-request-headers", "authorization"),
            "access-control-max-age": str(_MAX_AGE_S),
        }
        raw = [(name.encode(), value.encode("latin-1")) for name, value in allowed.items()]
        await send({"type": "http.response.start", "status": 204, "headers": raw})
        await send({"type": "http.response.body", "body": b""})


def _origin(scope: Scope) -> str:
    return Headers(scope=scope).get("origin", "") if scope["type"] == "http" else ""


def _allows(origins: frozenset[str], origin: str) -> bool:
    return bool(origin) and (origin in origins or "*" in origins)
