"""A bound on requests at the engine and on requests that wait for it."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from ple_gateway.errors import overloaded
from ple_gateway.metrics import Metrics
from ple_gateway.settings import Settings


class Gate:
    """First come, first served. A request holds a ticket from its acceptance, a place while it is at work."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self._places = asyncio.Semaphore(settings.max_in_flight)
        self._max_tickets = settings.max_in_flight + settings.max_queued
        self._queue_timeout_s = settings.queue_timeout_s
        self._tickets = 0
        self._metrics = metrics

    @property
    def idle(self) -> bool:
        """Whether no request holds a ticket."""
        return self._tickets == 0

    @contextmanager
    def ticket(self) -> Iterator[None]:
        """Admit a request before any work is done for it; raises 503 when all tickets are out."""
        if self._tickets >= self._max_tickets:
            self._metrics.rejections.labels("queue_full").inc()
            raise overloaded("Too many requests are waiting; try again shortly.")
        self._tickets += 1
        try:
            yield
        finally:
            self._tickets -= 1

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Wait for a place at the engine and hold it; raises 503 after `queue_timeout_s`."""
        await self._wait()
        self._metrics.in_flight.inc()
        try:
            yield
        finally:
            self._metrics.in_flight.dec()
            self._places.release()

    async def _wait(self) -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        with self._metrics.queued.track_inprogress():
            try:
                async with asyncio.timeout(self._queue_timeout_s):
                    await self._places.acquire()
            except TimeoutError as exc:
                self._metrics.rejections.labels("queue_timeout").inc()
                raise overloaded("The request waited too long for a place.", retry_after_s=30) from exc
        self._metrics.queue_wait.observe(loop.time() - began_s)
