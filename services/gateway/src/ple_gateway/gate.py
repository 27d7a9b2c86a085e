"""Drives the scheduler: requests wait here for room at the engine, and for an engine at all."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial

from ple_gateway.capacity import Capacity, Demand
from ple_gateway.errors import GatewayError, UnreachableError, backend_unavailable, key_busy, overloaded
from ple_gateway.exchange import Exchange
from ple_gateway.metrics import Metrics
from ple_gateway.scheduler import Lane, Limits, Refusal, RefusedError, Scheduler, Ticket, TicketState
from ple_gateway.settings import Settings

_SETTLE_S = 3.0  # for the first look at the engine, after the gateway's own start
_TICK_S = 0.1  # how late a deadline of the queue may be noticed


@dataclass
class Place:
    """What a request holds at the engine; `lost` when the engine was found gone before it took anything."""

    lost: bool = False


class Gate:
    """Every request passes: a ticket from its acceptance, a place while the engine works on it."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self._limits = Limits(
            settings.max_in_flight,
            settings.max_queued,
            settings.max_in_flight_per_key,
            settings.max_queued_per_key,
            settings.queue_timeout_s,
            settings.hold_timeout_s,
            settings.lane_ageing_s,
        )
        self._scheduler = Scheduler(self._limits)
        self._metrics = metrics
        self._decisions: dict[Ticket, asyncio.Future[None]] = {}
        self._ticking: asyncio.TimerHandle | None = None
        self._tickets: Counter[str | None] = Counter()  # by key
        self._random = random.Random()  # noqa: S311 jitter is no secret
        self._settled = asyncio.Event()
        self._holds = settings.hold_timeout_s > 0
        self._reason = ("The engine has not been asked yet.", 15.0)
        self.events_relayed = 0  # of all streams: a sign that the engine gets on
        self.on_unreachable: Callable[[], None] = lambda: None
        self._publish()

    @property
    def idle(self) -> bool:
        """Whether no request holds a ticket, a place in the queue, or blocks."""
        scheduler = self._scheduler
        held = scheduler.running or scheduler.waiting or scheduler.used_blocks or scheduler.used_sequences
        return not self.tickets and not held

    @property
    def tickets(self) -> int:
        """How many requests were accepted and have not ended."""
        return self._tickets.total()

    @property
    def capacity(self) -> Capacity | None:
        """What the engine holds, as far as it is known."""
        return self._scheduler.capacity

    @capacity.setter
    def capacity(self, capacity: Capacity | None) -> None:
        if capacity != self._scheduler.capacity:
            self._scheduler.capacity = capacity
            self._advance()

    @property
    def running(self) -> int:
        """How many requests the engine may be working on."""
        return len(self._scheduler.running)

    @property
    def used_blocks(self) -> int:
        """Blocks set aside for them."""
        return self._scheduler.used_blocks

    def queued(self, lane: Lane) -> int:
        """How many requests wait in a lane."""
        return self._scheduler.queued(lane)

    def open(self) -> None:
        """Let requests go to the engine."""
        self._settled.set()
        self._scheduler.open()
        self._advance()

    def close(self, reason: str, retry_after_s: float, *, hold: bool = True) -> None:
        """Let nobody go; `reason` is for those who cannot wait or waited long enough: all unless `hold`."""
        self._settled.set()
        self._reason = (reason, retry_after_s)
        self._holds = hold and self._limits.hold_timeout_s > 0
        self._scheduler.close(_now_s())
        if not hold:
            self._tell(self._scheduler.refuse_waiting(Refusal.STALLED))

    @contextmanager
    def ticket(self, exchange: Exchange) -> Iterator[None]:
        """Admit a request before any work is done for it; raises 503 or 429 when it could not even wait."""
        limits, key = self._limits, exchange.key
        if self.tickets >= limits.max_in_flight + limits.max_queued:
            raise self._refused(Refusal.QUEUE_FULL, Lane.INTERACTIVE)
        # Also those whose bodies are still being read: a key's slow ones must not take everyone's tickets.
        if key is not None and self._tickets[key] >= limits.max_in_flight_per_key + limits.max_queued_per_key:
            raise self._refused(Refusal.KEY_LIMIT, Lane.INTERACTIVE)
        try:
            self._scheduler.check_room(key)
        except RefusedError as exc:
            raise self._refused(exc.refusal, Lane.INTERACTIVE) from exc
        self._tickets[key] += 1
        try:
            yield
        finally:
            self._tickets[key] -= 1

    @asynccontextmanager
    async def place(
        self, demand: Demand, lane: Lane, exchange: Exchange, *, patient: bool
    ) -> AsyncIterator[Place]:
        """Wait for room at the engine and hold it within the block; raises GatewayError 429 or 503.

        A patient request (its client is kept alive) also waits for an engine that is away, and when the
        engine is found gone before it took anything, the block just ends, with `lost` set.
        """
        place = Place()
        lane = lane if exchange.lane is None else exchange.lane
        ticket = await self._enter(demand, lane, exchange.key, patient=patient)
        try:
            await self._decided(ticket)
            yield place
        except UnreachableError:
            self.on_unreachable()
            if not patient or not self._holds:
                raise
            place.lost = True
        finally:
            self._scheduler.end(ticket)
            self._advance()

    async def _enter(self, demand: Demand, lane: Lane, key: str | None, *, patient: bool) -> Ticket:
        if not patient or not self._holds:
            with suppress(TimeoutError):
                async with asyncio.timeout(_SETTLE_S):
                    await self._settled.wait()
            if not self._scheduler.is_open:
                raise self._refused(Refusal.UNAVAILABLE, lane)
        try:
            return self._scheduler.submit(demand, lane, key, _now_s())
        except RefusedError as exc:
            raise self._refused(exc.refusal, lane) from exc

    async def _decided(self, ticket: Ticket) -> None:
        if ticket.state is TicketState.WAITING:
            decision = self._decisions[ticket] = asyncio.get_running_loop().create_future()
            self._tick_later()
            try:
                await decision
            finally:
                del self._decisions[ticket]
        self._metrics.queue_wait.labels(ticket.lane.label).observe(_now_s() - ticket.since_s)
        if ticket.refusal:
            raise self._refused(ticket.refusal, ticket.lane)

    def _advance(self) -> None:
        self._tell(self._scheduler.advance(_now_s()))

    def _tell(self, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            decision = self._decisions.get(ticket)
            if decision and not decision.done():
                decision.set_result(None)

    def _tick_later(self) -> None:
        if self._ticking is None:
            self._ticking = asyncio.get_running_loop().call_later(_TICK_S, self._tick)

    def _tick(self) -> None:
        self._ticking = None
        self._advance()
        if self._scheduler.waiting:
            self._tick_later()

    def _refused(self, refusal: Refusal, lane: Lane) -> GatewayError:
        self._metrics.rejections.labels(refusal.value).inc()
        if refusal in {Refusal.UNAVAILABLE, Refusal.STALLED}:
            reason, retry_after_s = self._reason
            return backend_unavailable(reason, retry_after_s=retry_after_s)
        # Background work comes back at different times, and not before what people wait for had its turn.
        retry_after_s = self._random.uniform(5, 30) if lane is Lane.BACKGROUND else 5
        if refusal is Refusal.KEY_LIMIT:
            return key_busy("Too many requests of this API key are waiting.", retry_after_s=retry_after_s)
        if refusal is Refusal.QUEUE_TIMEOUT:
            return overloaded("The request waited too long for a place.", retry_after_s=30)
        return overloaded("Too many requests are waiting; try again shortly.", retry_after_s=retry_after_s)

    def _publish(self) -> None:
        """Metrics read these when somebody asks; the path of a request pays nothing."""
        self._metrics.in_flight.set_function(lambda: self.running)
        self._metrics.reserved_blocks.set_function(lambda: self.used_blocks)
        self._metrics.budget_blocks.set_function(lambda: self.capacity.budget_blocks if self.capacity else 0)
        for lane in Lane:
            self._metrics.queued.labels(lane.label).set_function(partial(self.queued, lane))


def _now_s() -> float:
    return asyncio.get_running_loop().time()
