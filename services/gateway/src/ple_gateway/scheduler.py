"""Who is served next: two lanes, ageing, limits per key, a budget of blocks. No clock and no I/O in here."""

from collections import Counter
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from itertools import count
from typing import Literal

from ple_gateway.capacity import Capacity, Demand


class Lane(IntEnum):
    """A lane's class when a request arrives; lower is served first."""

    INTERACTIVE = 0
    BACKGROUND = 1

    @property
    def label(self) -> Literal["interactive", "background"]:
        """The lane's name in headers and metrics."""
        return "background" if self else "interactive"


class Refusal(StrEnum):
    """Why a request is not served."""

    QUEUE_FULL = "queue_full"
    KEY_LIMIT = "key_limit"
    QUEUE_TIMEOUT = "queue_timeout"
    UNAVAILABLE = "unavailable"
    STALLED = "stalled"


class RefusedError(Exception):
    """A request may not even wait."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.value)
        self.refusal = refusal


class TicketState(StrEnum):
    """Where a ticket is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(eq=False)
class Ticket:
    """One request's place in the queue, then at the engine."""

    demand: Demand
    lane: Lane
    key: str | None  # None: no limit per key
    since_s: float
    number: int
    state: TicketState = TicketState.WAITING
    refusal: Refusal | None = None
    blocks: int = 0  # held while running
    sequences: int = 0


@dataclass(frozen=True)
class Limits:
    """Bounds of the queue and of one key."""

    max_in_flight: int
    max_queued: int
    max_in_flight_per_key: int
    max_queued_per_key: int
    queue_timeout_s: float
    hold_timeout_s: float
    ageing_s: float

    @property
    def max_queued_background(self) -> int:
        """Background work fills half of the queue, so that it never keeps an interactive request out."""
        return -(-self.max_queued // 2)


@dataclass
class Scheduler:
    """Decides; whoever drives it passes the time, and tells waiting requests what was decided.

    Order: class, then arrival. A request's class falls by one for every `ageing_s` that it has waited. The
    first in order is served next or nobody is: nothing overtakes a long prompt for which there is no room
    yet. Only requests whose key runs all that it may are passed over.
    """

    limits: Limits
    capacity: Capacity | None = None  # None: requests are counted
    waiting: list[Ticket] = field(default_factory=list)
    running: set[Ticket] = field(default_factory=set)
    used_blocks: int = 0
    used_sequences: int = 0
    _closed_s: float | None = 0.0  # since when nobody is admitted; None while the engine can serve
    _running_of: Counter[str] = field(default_factory=Counter)
    _numbers: "count[int]" = field(default_factory=count)

    @property
    def is_open(self) -> bool:
        """Whether requests are admitted."""
        return self._closed_s is None

    def open(self) -> None:
        """Admit from now on."""
        self._closed_s = None

    def close(self, now_s: float) -> None:
        """Admit nobody until `open`; who waits may wait `hold_timeout_s` for it."""
        if self._closed_s is None:
            self._closed_s = now_s

    def check_room(self, key: str | None) -> None:
        """Raise RefusedError when a request of this key could not even wait, whatever it asks for."""
        if self.waiting and len(self.waiting) >= self.limits.max_queued:
            raise RefusedError(Refusal.QUEUE_FULL)
        if key is not None and self._waiting_of(key) >= self.limits.max_queued_per_key:
            raise RefusedError(Refusal.KEY_LIMIT)

    def submit(self, demand: Demand, lane: Lane, key: str | None, now_s: float) -> Ticket:
        """Take a request in: it may be running already. Raises RefusedError when there is no room to wait."""
        ticket = Ticket(demand, lane, key, now_s, next(self._numbers))
        self.waiting.append(ticket)
        self._admit(now_s)
        refusal = self._overfull(ticket) if ticket.state is TicketState.WAITING else None
        if refusal:
            self._refuse(ticket, refusal)
            raise RefusedError(refusal)
        return ticket

    def advance(self, now_s: float) -> list[Ticket]:
        """Let time pass; returns the tickets that were admitted or refused."""
        decided = [ticket for ticket in self.waiting if self._out_of_patience(ticket, now_s)]
        return decided + self._admit(now_s)

    def end(self, ticket: Ticket) -> None:
        """Give back whatever a ticket holds; a second time does nothing."""
        if ticket.state is TicketState.WAITING:
            self.waiting.remove(ticket)
        elif ticket.state is TicketState.RUNNING:
            self.running.remove(ticket)
            self.used_blocks -= ticket.blocks
            self.used_sequences -= ticket.sequences
            self._count_key(ticket, -1)
        ticket.state = TicketState.ENDED

    def refuse_waiting(self, refusal: Refusal) -> list[Ticket]:
        """Empty the queue; returns who was in it."""
        refused = list(self.waiting)
        for ticket in refused:
            self._refuse(ticket, refusal)
        return refused

    def class_of(self, ticket: Ticket, now_s: float) -> int:
        """The class by which a ticket is ordered now; negative once it has aged beyond the lanes."""
        return int(ticket.lane) - int((now_s - ticket.since_s) // self.limits.ageing_s)

    def queued(self, lane: Lane) -> int:
        """How many wait in a lane."""
        return sum(ticket.lane is lane for ticket in self.waiting)

    def _admit(self, now_s: float) -> list[Ticket]:
        admitted: list[Ticket] = []
        while self.is_open and (ticket := self._first(now_s)) and self._fits(ticket):
            self.waiting.remove(ticket)
            self.running.add(ticket)
            ticket.state = TicketState.RUNNING
            ticket.blocks, ticket.sequences = self._cost(ticket)
            self.used_blocks += ticket.blocks
            self.used_sequences += ticket.sequences
            self._count_key(ticket, 1)
            admitted.append(ticket)
        return admitted

    def _first(self, now_s: float) -> Ticket | None:
        eligible = [ticket for ticket in self.waiting if not self._key_is_busy(ticket)]
        return min(eligible, key=lambda t: (self.class_of(t, now_s), t.number), default=None)

    def _fits(self, ticket: Ticket) -> bool:
        blocks, sequences = self._cost(ticket)
        budget = self.capacity.budget_blocks if self.capacity else 0
        return self.used_sequences + sequences <= self._max_sequences() and (
            self.capacity is None or self.used_blocks + blocks <= budget
        )

    def _cost(self, ticket: Ticket) -> tuple[int, int]:
        # Computed when it is needed: the engine may have come back with another pool while a request waited.
        if self.capacity is None:
            return 0, 1
        sequences = min(ticket.demand.sequences, self._max_sequences())
        return self.capacity.cost_blocks(ticket.demand), sequences

    def _max_sequences(self) -> int:
        held = self.capacity.max_num_seqs if self.capacity else self.limits.max_in_flight
        return min(held, self.limits.max_in_flight)

    def _key_is_busy(self, ticket: Ticket) -> bool:
        return ticket.key is not None and self._running_of[ticket.key] >= self.limits.max_in_flight_per_key

    def _count_key(self, ticket: Ticket, step: int) -> None:
        if ticket.key is not None:
            self._running_of[ticket.key] += step
            if not self._running_of[ticket.key]:
                del self._running_of[ticket.key]

    def _waiting_of(self, key: str) -> int:
        return sum(ticket.key == key for ticket in self.waiting)

    def _overfull(self, ticket: Ticket) -> Refusal | None:
        if len(self.waiting) > self.limits.max_queued:
            return Refusal.QUEUE_FULL
        if ticket.lane and self.queued(Lane.BACKGROUND) > self.limits.max_queued_background:
            return Refusal.QUEUE_FULL
        if ticket.key is not None and self._waiting_of(ticket.key) > self.limits.max_queued_per_key:
            return Refusal.KEY_LIMIT
        return None

    def _out_of_patience(self, ticket: Ticket, now_s: float) -> bool:
        if now_s - ticket.since_s >= self.limits.queue_timeout_s:
            self._refuse(ticket, Refusal.QUEUE_TIMEOUT)
        elif self._closed_s is not None:
            held_since_s = max(self._closed_s, ticket.since_s)
            if now_s - held_since_s >= self.limits.hold_timeout_s:
                self._refuse(ticket, Refusal.UNAVAILABLE)
        return ticket.refusal is not None

    def _refuse(self, ticket: Ticket, refusal: Refusal) -> None:
        ticket.refusal = refusal
        self.end(ticket)
