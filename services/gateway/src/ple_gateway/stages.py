"""Time limits of a request's stages, of the whole, and of the gateway's shutdown."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from ple_gateway.errors import GatewayError, timed_out
from ple_gateway.exchange import Exchange

_TEXTS = {
    "headers": "The engine did not accept the request in time.",
    "first_token": "The engine did not produce a first token in time.",
    "between_tokens": "The engine stopped producing tokens.",
    "answer": "The engine did not answer in time.",
}


class StageClock:
    """The deadline of the stage that a request is in; never later than the deadline of the whole."""

    def __init__(self, timeout: asyncio.Timeout, exchange: Exchange, total_s: float) -> None:
        self._timeout = timeout
        self._exchange = exchange
        self._loop = asyncio.get_running_loop()
        self._ends_s = self._loop.time() + total_s
        self.draining = False
        timeout.reschedule(self._ends_s)

    def enter(self, stage: str, limit_s: float) -> None:
        """Begin a stage that may take `limit_s` seconds; each call starts its time anew."""
        self._exchange.stage = stage
        if not self.draining:
            self._timeout.reschedule(min(self._loop.time() + limit_s, self._ends_s))

    def expire(self) -> None:
        """End the request now: the gateway stops."""
        if not self.draining and not self._timeout.expired():
            self.draining = True
            self._timeout.reschedule(self._loop.time())


class StageClocks:
    """All running clocks, so that a shutdown can end what outlives its drain."""

    def __init__(self, total_timeout_s: float) -> None:
        self._total_timeout_s = total_timeout_s
        self._running: set[StageClock] = set()
        self.prefills = Prefills()

    @asynccontextmanager
    async def running(self, exchange: Exchange) -> AsyncIterator[StageClock]:
        """Run a block under a clock; raises 504 naming the stage, or 503 when the gateway stops."""
        clock: StageClock | None = None
        try:
            async with asyncio.timeout(None) as timeout:
                clock = StageClock(timeout, exchange, self._total_timeout_s)
                self._running.add(clock)
                yield clock
        except TimeoutError as exc:
            if clock is not None and clock.draining:
                raise GatewayError(
                    503, "The gateway is stopping.", code="shutting_down", retry_after_s=5
                ) from exc
            raise timed_out(_TEXTS.get(exchange.stage, "The request took too long.")) from exc
        finally:
            if clock is not None:
                self._running.discard(clock)

    def expire_all(self) -> None:
        """End every running request."""
        for clock in list(self._running):
            clock.expire()


class Prefill:
    """A prompt that the engine is reading."""

    def __init__(self, all_s: dict["Prefill", float], own_s: float) -> None:
        self._all_s = all_s
        all_s[self] = own_s

    @property
    def backlog_s(self) -> float:
        """Seconds until the engine has read all prompts that it is reading now."""
        return sum(self._all_s.values())

    def end(self) -> None:
        """The first token is there; a second call does nothing."""
        self._all_s.pop(self, None)


class Prefills:
    """All prompts that the engine is reading: several long ones take turns, and each takes as long as all."""

    def __init__(self) -> None:
        self._all_s: dict[Prefill, float] = {}

    @contextmanager
    def running(self, estimate_s: float) -> Iterator[Prefill]:
        """Count a prompt until its first token or the end of the block."""
        prefill = Prefill(self._all_s, estimate_s)
        try:
            yield prefill
        finally:
            prefill.end()
