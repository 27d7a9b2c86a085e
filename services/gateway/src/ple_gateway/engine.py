"""The client of the inference service: one connection pool, raw bytes, nothing retried."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx2

from ple_gateway.engine_errors import from_engine
from ple_gateway.errors import GatewayError, UnreachableError, backend_lost, unreachable
from ple_gateway.exchange import Exchange
from ple_gateway.metrics import Metrics
from ple_gateway.settings import Settings

# Shorter than the idle time of the usual servers (uvicorn: 5 s): a POST on a connection that is just being
# closed would be lost, and is never sent twice.
_KEEPALIVE_S = 2.0
_PROBE_TIMEOUT_S = 3.0
_MAX_ERROR_BYTES = 64 * 1024


@dataclass(frozen=True)
class EngineCall:
    """One POST to the engine; `body` is JSON."""

    path: str
    body: bytes


class Engine:
    """Speaks to the engine and turns its failures into GatewayError."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self._settings = settings
        self._metrics = metrics
        headers = {"accept-encoding": "identity"}
        if settings.engine_api_key:
            headers["authorization"] = f"Bearer {settings.engine_api_key.get_secret_value()}"
        self._client = httpx2.AsyncClient(
            base_url=settings.engine_url,
            headers=headers,
            # Stages have clocks of their own; only connecting is timed here.
            timeout=httpx2.Timeout(None, connect=settings.connect_timeout_s),
            limits=httpx2.Limits(
                max_connections=None, max_keepalive_connections=64, keepalive_expiry=_KEEPALIVE_S
            ),
            trust_env=False,
        )

    async def aclose(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    @asynccontextmanager
    async def stream(self, call: EngineCall, exchange: Exchange) -> AsyncIterator[AsyncIterator[bytes]]:
        """POST and give the answer's raw bytes; leaving the block closes the connection if bytes are left.

        Raises GatewayError for an error status and for whatever the connection suffers within the block.
        """
        headers = {"content-type": "application/json", "x-request-id": exchange.request_id}
        try:
            async with self._client.stream("POST", call.path, content=call.body, headers=headers) as response:
                if response.status_code != 200:
                    body = await _read_up_to(response, _MAX_ERROR_BYTES)
                    raise from_engine(
                        response.status_code, body, retry_after=response.headers.get("retry-after")
                    )
                yield response.aiter_raw()
        except httpx2.TransportError as exc:
            self._metrics.engine_errors.labels(exchange.stage).inc()
            error = _transport_error(exc)
            if not isinstance(error, UnreachableError):
                self._metrics.upstream_lost.inc()
            raise error from exc

    async def post(self, call: EngineCall, exchange: Exchange) -> bytes:
        """POST and return the whole answer; raises GatewayError."""
        async with self.stream(call, exchange) as chunks:
            received = bytearray()
            async for chunk in chunks:
                received += chunk
                if len(received) > self._settings.max_answer_bytes:
                    raise backend_lost("The engine's answer is too large.")
            return bytes(received)

    async def ask(self, call: EngineCall, timeout_s: float) -> bytes:
        """POST a question of the gateway's own; raises GatewayError, TimeoutError."""
        async with asyncio.timeout(timeout_s):
            return await self.post(call, Exchange(f"gateway_{uuid.uuid4().hex}", stage="question"))

    async def get(self, path: str) -> httpx2.Response:
        """GET something small, for probes; raises httpx2.TransportError."""
        return await self._client.get(path, timeout=_PROBE_TIMEOUT_S)


async def _read_up_to(response: httpx2.Response, limit_bytes: int) -> bytes:
    received = bytearray()
    async for chunk in response.aiter_raw():
        received += chunk
        if len(received) >= limit_bytes:
            break
    return bytes(received[:limit_bytes])


def _transport_error(exc: httpx2.TransportError) -> GatewayError:
    if isinstance(exc, httpx2.ConnectError | httpx2.ConnectTimeout):
        return unreachable("The engine cannot be reached; it may be starting.")
    return backend_lost("The connection to the engine was lost.")
