"""The streamed answer: the client's side of an event stream, and the loop that fills it."""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

from starlette.types import Message, Send

from ple_gateway.dialect import AnswerEvents
from ple_gateway.errors import GatewayError
from ple_gateway.metrics import Metrics

_LOG = logging.getLogger(__name__)
_CLOSE_TIMEOUT_S = 3.0
_START: Message = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
    ],
}


class EventStream:
    """One client's event stream: opens once, sends whole events, and can still be refused until it opens."""

    def __init__(self, send: Send, events: AnswerEvents, metrics: Metrics) -> None:
        self._send = send
        self._events = events
        self._metrics = metrics
        self._opening = asyncio.Lock()
        self._open = False
        self._refused = False
        self._last_sent_s = 0.0

    async def open(self) -> None:
        """Send status 200 and the headers, once; nothing when the request was refused before."""
        async with self._opening:
            if not self._open and not self._refused:
                # A copy: middleware adds headers to the message it is given.
                await self._send({**_START, "headers": list(_START["headers"])})
                self._open = True

    async def refuse(self) -> bool:
        """Keep the stream from opening; False when it is open already."""
        async with self._opening:
            self._refused = not self._open
            return self._refused

    async def event(self, frames: bytes) -> None:
        """Send whole events at once."""
        if not self._open:
            await self.open()
        await self._write(frames)

    async def close(self, error: GatewayError | None = None) -> None:
        """End the stream as its dialect does, a failed one with an error.

        A client that takes nothing any more is given up: the server then closes its connection.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self.event(self._events.failure(error) if error else self._events.end())
                await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    @asynccontextmanager
    async def kept_alive(self, commit_delay_s: float, interval_s: float) -> AsyncIterator[None]:
        """Within the block: open after `commit_delay_s`, then send a comment in every silent interval."""
        heart = asyncio.create_task(self._beat(commit_delay_s, interval_s))
        try:
            yield
        finally:
            heart.cancel()
            with suppress(asyncio.CancelledError):
                await heart

    async def _beat(self, commit_delay_s: float, interval_s: float) -> None:
        await asyncio.sleep(commit_delay_s)
        await self.open()
        loop = asyncio.get_running_loop()
        while interval_s and not self._refused:
            silent_s = loop.time() - self._last_sent_s
            if silent_s >= interval_s or not self._last_sent_s:
                self._metrics.comments.inc()
                await self._write(self._events.keepalive)
                silent_s = 0.0
            await asyncio.sleep(interval_s - silent_s)

    async def _write(self, event: bytes) -> None:
        self._last_sent_s = asyncio.get_running_loop().time()
        await self._send({"type": "http.response.body", "body": event, "more_body": True})


async def serve_events(stream: EventStream, work: Coroutine[Any, Any, None]) -> GatewayError | None:
    """Run `work`, which sends events; end the stream in order whatever happens.

    Raises GatewayError while a status can still tell it; afterwards it goes into the stream and is returned.
    """
    try:
        await work
    except GatewayError as error:
        if await stream.refuse():
            raise
        await stream.close(error)
        return error
    except Exception:
        if await stream.refuse():
            raise
        _LOG.exception("stream failed by a fault of the gateway")
        fault = GatewayError(500, "The gateway failed to serve this request.", code="internal_error")
        await stream.close(fault)
        return fault
    await stream.close()
    return None
