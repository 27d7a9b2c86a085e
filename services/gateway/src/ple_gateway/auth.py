"""API keys: who may use the gateway."""

from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ple_gateway.errors import GatewayError
from ple_gateway.exchange import exchange_of
from ple_gateway.keys import ApiKey, find_key

_OPEN_PATHS = frozenset({"/", "/livez", "/readyz", "/health"})


class ApiKeyMiddleware:
    """Refuse requests without a known key, before anything of their body is read.

    With no keys every request passes: settings allow that on a loopback address only.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[ApiKey], *, metrics_need_key: bool) -> None:
        self._app = app
        self._keys = tuple(keys)
        self._open_paths = _OPEN_PATHS if metrics_need_key else _OPEN_PATHS | {"/metrics", "/status.json"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._keys or scope["path"] in self._open_paths:
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = _bearer(headers) or _anthropic_key(scope, headers)
        if given is None:
            raise _refused("You didn't provide an API key. Send it as 'Authorization: Bearer KEY'.")
        key = find_key(self._keys, given)
        if key is None:
            raise _refused("Incorrect API key provided.")
        exchange = exchange_of(scope)
        exchange.key = key.name
        if exchange.lane is None:
            exchange.lane = key.lane
        await self._app(scope, receive, send)


def _bearer(headers: Headers) -> str | None:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" and key.strip() else None


def _anthropic_key(scope: Scope, headers: Headers) -> str | None:
    """Anthropic's clients send their key bare."""
    return headers.get("x-api-key") if scope["path"].startswith("/v1/messages") else None


def _refused(message: str) -> GatewayError:
    return GatewayError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
