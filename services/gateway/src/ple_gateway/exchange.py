"""One request and its answer: identity, timing, the access line, and the last resort for errors."""

import logging
import re
import time
import uuid
from collections.abc import Collection
from dataclasses import dataclass, field

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ple_gateway.errors import GatewayError
from ple_gateway.metrics import Metrics
from ple_gateway.recent import Recent
from ple_gateway.scheduler import Lane

_LOG = logging.getLogger(__name__)
_CLIENT_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_QUIET = {"/", "/livez", "/readyz", "/health", "/metrics", "/status.json"}
_KEY = "ple_gateway.exchange"


@dataclass
class Exchange:
    """What is known of one request while it is served; handlers fill in `outcome` and `stage`."""

    request_id: str
    started_s: float = field(default_factory=time.monotonic)
    status: int = 0  # 0 until the response has begun
    outcome: str = ""  # set by handlers where the status does not tell
    stage: str = "body"
    key: str | None = None  # which API key, by a name that tells nothing; None: there are no keys
    lane: Lane | None = None  # asked for by header, else the key's
    first_token_s: float | None = None
    headers: dict[str, str] = field(default_factory=dict)  # beside those of every response
    error: str | None = None  # a failure's code

    def elapsed_s(self) -> float:
        """Seconds since the request's headers were read."""
        return time.monotonic() - self.started_s


def exchange_of(scope: Scope) -> Exchange:
    """Return the exchange that ExchangeMiddleware put into the scope."""
    exchange: Exchange = scope[_KEY]
    return exchange


class ExchangeMiddleware:
    """Outermost layer: request ids, processing time, one log line, and OpenAI's shape for every error.

    Routes outside `routes` share the metric label "other", so that scanners cannot grow it.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, recent: Recent, routes: Collection[str]) -> None:
        self._app = app
        self._recent = recent
        self._metrics = metrics
        self._routes = frozenset(routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        exchange = scope[_KEY] = Exchange(_request_id(headers), lane=_lane(headers))

        async def stamped(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = exchange.request_id
                if scope["path"].startswith("/v1/messages"):
                    headers["request-id"] = exchange.request_id  # the name that Anthropic's clients read
                headers["openai-processing-ms"] = str(round(exchange.elapsed_s() * 1000))
                headers.update(exchange.headers)
            await send(message)

        try:
            await self._answer(scope, receive, stamped, exchange)
        finally:
            self._note(scope, exchange)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, exchange: Exchange) -> None:
        try:
            await self._app(scope, receive, send)
        except GatewayError as error:
            if exchange.status:
                raise
            exchange.error = error.code or error.type
            await error(scope, receive, send)
        except Exception:
            _LOG.exception("request failed by a fault of the gateway id=%s", exchange.request_id)
            exchange.outcome, exchange.error = "fault", "internal_error"
            if not exchange.status:
                fault = GatewayError(500, "The gateway failed to serve this request.", code="internal_error")
                await fault(scope, receive, send)

    def _note(self, scope: Scope, exchange: Exchange) -> None:
        route = scope["path"] if scope["path"] in self._routes else "other"
        outcome = exchange.outcome or (f"{exchange.status // 100}xx" if exchange.status else "no_answer")
        self._metrics.requests.labels(route, outcome).inc()
        if exchange.error and route != "other":
            self._recent.note_error(route, exchange.status, exchange.error)
        if exchange.first_token_s is not None:
            self._recent.note_first_token(exchange.first_token_s)
        headers = Headers(scope=scope)
        quiet = route in _QUIET
        _LOG.log(
            logging.DEBUG if quiet else logging.INFO,
            "request done id=%s method=%s route=%s status=%d outcome=%s ms=%.1f ttft_ms=%s retry=%s "
            "idempotency_key=%s",
            exchange.request_id,
            scope["method"],
            route,
            exchange.status,
            outcome,
            exchange.elapsed_s() * 1000,
            "-" if exchange.first_token_s is None else round(exchange.first_token_s * 1000),
            _digits(headers.get("x-stainless-retry-count")),
            _plain(headers.get("idempotency-key")),
        )


def _request_id(headers: Headers) -> str:
    given = headers.get("x-request-id", "")
    return given if _CLIENT_ID.fullmatch(given) else f"req_{uuid.uuid4().hex}"


def _lane(headers: Headers) -> Lane | None:
    # Other values belong to somebody else's header of that name.
    wanted = headers.get("x-priority", "").strip().lower()
    return next((lane for lane in Lane if lane.label == wanted), None)


def _digits(value: str | None) -> str:
    return value if value and value.isascii() and value.isdigit() and len(value) < 4 else "-"


def _plain(value: str | None) -> str:
    return value if value and _CLIENT_ID.fullmatch(value) else "-"
