"""The client of the inference service: one connection pool, raw bytes, nothing retried."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from ple_gateway.engine_errors import from_engine
from ple_gateway.errors import GatewayError, UnreachableError, backend_lost, unreachable
from ple_gateway.exchange import Exchange
from ple_gateway.metrics import Metrics
from ple_gateway.settings import Settings
from ple_gateway.upstream import ConnectError, Reply, Upstream, UpstreamError

# Shorter than the idle time of the usual servers (uvicorn: 5 s): a POST on a connection that is just being
# closed would be lost, and is never sent twice.
_KEEPALIVE_S = 2.0
_PROBE_TIMEOUT_S = 3.0
_MAX_ERROR_BYTES = 64 * 1024
_MAX_PROBE_BYTES = 4 * 2**20


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
        headers = {"content-type": "application/json"}
        if settings.engine_api_key:
            headers["authorization"] = f"Bearer {settings.engine_api_key.get_secret_value()}"
        # Stages have clocks of their own; only connecting is timed here.
        self._upstream = Upstream(
            settings.engine_url,
            headers,
            connect_timeout_s=settings.connect_timeout_s,
            idle_s=_KEEPALIVE_S,
        )

    async def aclose(self) -> None:
        """Close all connections."""
        await self._upstream.aclose()

    @asynccontextmanager
    async def stream(self, call: EngineCall, exchange: Exchange) -> AsyncIterator[AsyncIterator[bytes]]:
        """POST and give the answer's raw bytes; leaving the block closes the connection if bytes are left.

        Raises GatewayError for an error status and for whatever the connection suffers within the block.
        """
        headers = {"x-request-id": exchange.request_id}
        try:
            async with self._upstream.exchange("POST", call.path, call.body, headers) as answer:
                if answer.status != 200:
                    body = await _read_up_to(answer, _MAX_ERROR_BYTES)
                    raise from_engine(answer.status, body, retry_after=answer.headers.get("retry-after"))
                yield answer
        except UpstreamError as exc:
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

    async def get(self, path: str) -> Reply:
        """GET something small, for probes; raises UpstreamError."""
        return await self._upstream.get(path, _PROBE_TIMEOUT_S, _MAX_PROBE_BYTES)


async def _read_up_to(chunks: AsyncIterator[bytes], limit_bytes: int) -> bytes:
    received = bytearray()
    async for chunk in chunks:
        received += chunk
        if len(received) >= limit_bytes:
            break
    return bytes(received[:limit_bytes])


def _transport_error(exc: UpstreamError) -> GatewayError:
    if isinstance(exc, ConnectError):
        return unreachable("The engine cannot be reached; it may be starting.")
    return backend_lost("The connection to the engine was lost.")
