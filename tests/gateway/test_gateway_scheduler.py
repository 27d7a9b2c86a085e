"""The scheduler alone, under any order of events: the budget holds, nobody starves, all is given back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)

from ple_gateway.capacity import Capacity, Demand, parse_capacity
from ple_gateway.scheduler import Lane, Limits, Refusal, RefusedError, Scheduler, TicketState

LIMITS = Limits(
    max_in_flight=6,
    max_queued=8,
    max_in_flight_per_key=2,
    max_queued_per_key=4,
    queue_timeout_s=600,
    hold_timeout_s=120,
    ageing_s=60,
)
MTP_RELEASE = Capacity(170, 58, 9776, 262_144, 4)
capacities = st.none() | st.builds(
    Capacity,
    num_blocks=st.integers(1, 300),
    fixed_blocks_per_request=st.integers(0, 60),
    tokens_per_block=st.integers(1, 10_000),
    max_model_len=st.integers(1, 262_144),
    max_num_seqs=st.integers(1, 6),
)
demands = st.builds(Demand, st.integers(0, 300_000), st.integers(1, 20_000), st.integers(1, 4))


def scheduler(capacity: Capacity | None = MTP_RELEASE, **limits: float) -> Scheduler:
    made = Scheduler(Limits(**{**LIMITS.__dict__, **limits}), capacity)
    made.open()
    return made


class AnyOrder(RuleBasedStateMachine):
    """Requests come, end, leave and time passes; engines restart with other pools."""

    tickets = Bundle("tickets")

    @initialize(capacity=capacities)
    def begin(self, capacity):
        self.scheduler = scheduler(capacity)
        self.now_s = 0.0
        self.seen = []

    def check(self, admitted_before):
        """Whoever was admitted came before all of their class that could have been."""
        for ticket in [t for t in self.scheduler.running if t not in admitted_before]:
            for other in self.scheduler.waiting:
                same = (other.lane, other.key) == (ticket.lane, ticket.key)
                assert not same or other.number > ticket.number, "first come, first served within a class"

    @rule(target=tickets, demand=demands, lane=st.sampled_from(Lane), key=st.sampled_from([None, "a", "b"]))
    def submit(self, demand, lane, key):
        before = set(self.scheduler.running)
        try:
            ticket = self.scheduler.submit(demand, lane, key, self.now_s)
        except RefusedError:
            return None
        finally:
            self.check(before)
        self.seen.append(ticket)
        return ticket

    @rule(ticket=tickets)
    def end(self, ticket):
        """Also of tickets that ended before: it must not count twice."""
        if ticket is not None:
            before = set(self.scheduler.running)
            self.scheduler.end(ticket)
            self.scheduler.advance(self.now_s)
            self.check(before)

    @rule(seconds=st.sampled_from([0.1, 30, 60, 200]))
    def wait(self, seconds):
        self.now_s += seconds
        for ticket in self.scheduler.advance(self.now_s):
            assert (ticket.state is TicketState.RUNNING) == (ticket.refusal is None)

    @rule(capacity=capacities)
    def restart(self, capacity):
        self.scheduler.capacity = capacity
        before = set(self.scheduler.running)
        self.scheduler.advance(self.now_s)
        self.check(before)

    @rule()
    def lose_the_engine(self):
        self.scheduler.close(self.now_s)

    @rule()
    def find_the_engine(self):
        self.scheduler.open()
        self.scheduler.advance(self.now_s)

    @rule()
    def stall(self):
        assert all(t.refusal is Refusal.STALLED for t in self.scheduler.refuse_waiting(Refusal.STALLED))
        assert not self.scheduler.waiting

    @invariant()
    def sums_are_right(self):
        if not hasattr(self, "scheduler"):
            return
        running = self.scheduler.running
        assert self.scheduler.used_blocks == sum(t.blocks for t in running)
        assert self.scheduler.used_sequences == sum(t.sequences for t in running)
        assert len(self.scheduler.waiting) <= LIMITS.max_queued
        for key in ("a", "b"):
            assert sum(t.key == key for t in running) <= LIMITS.max_in_flight_per_key
            assert sum(t.key == key for t in self.scheduler.waiting) <= LIMITS.max_queued_per_key
        assert all(t.state is TicketState.WAITING for t in self.scheduler.waiting)

    @invariant()
    def nobody_is_held_back_without_a_reason(self):
        if hasattr(self, "scheduler") and not self.scheduler.running and self.scheduler.is_open:
            assert not self.scheduler.waiting, "an idle engine serves whoever waits"

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.open()
        for _ in range(len(self.seen) + 1):  # as many rounds as there are requests serve all of them
            self.scheduler.advance(self.now_s)
            for ticket in list(self.scheduler.running):
                self.scheduler.end(ticket)
        assert all(t.state is TicketState.ENDED for t in self.seen)
        assert (self.scheduler.used_blocks, self.scheduler.used_sequences) == (0, 0)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@given(st.lists(st.tuples(demands, st.sampled_from(Lane)), max_size=20), st.data())
def test_never_over_budget(requests, data):
    queue = scheduler(max_queued=100, max_queued_per_key=100)
    tickets = [queue.submit(demand, lane, None, float(i)) for i, (demand, lane) in enumerate(requests)]
    now_s = 100.0
    while any(t.state is not TicketState.ENDED for t in tickets):
        assert queue.used_blocks <= MTP_RELEASE.budget_blocks
        assert queue.used_sequences <= MTP_RELEASE.max_num_seqs
        queue.end(data.draw(st.sampled_from(sorted(queue.running, key=lambda t: t.number))))
        queue.advance(now_s)
    assert not queue.used_blocks


def test_background_waits_while_interactive_is_queued_and_ages():
    queue = scheduler(max_in_flight=1)
    running = queue.submit(Demand(10, 10), Lane.INTERACTIVE, None, 0)
    background = queue.submit(Demand(10, 10), Lane.BACKGROUND, None, 0)
    for second in range(1, 60):
        interactive = queue.submit(Demand(10, 10), Lane.INTERACTIVE, None, second)
        queue.end(running)
        assert queue.advance(second) == [interactive]
        running = interactive
    queue.submit(Demand(10, 10), Lane.INTERACTIVE, None, 60)
    queue.end(running)
    assert queue.advance(60) == [background], "a class up after a minute, and it came first"


def test_nothing_overtakes_a_long_prompt_that_waits_for_room():
    queue = scheduler()
    first, second = (queue.submit(Demand(250_000, 100), Lane.INTERACTIVE, None, 0) for _ in range(2))
    long = queue.submit(Demand(250_000, 100), Lane.INTERACTIVE, None, 1)
    small = queue.submit(Demand(10, 10), Lane.INTERACTIVE, None, 2)
    assert (first.state, second.state) == (TicketState.RUNNING, TicketState.RUNNING)
    queue.end(first)
    assert queue.advance(3) == [long]
    assert small.state is TicketState.WAITING
    queue.end(long)
    assert queue.advance(4) == [small]


def test_busy_key_is_passed_over():
    queue = scheduler(None)
    mine = [queue.submit(Demand(1, 1), Lane.INTERACTIVE, "a", 0) for _ in range(3)]
    other = queue.submit(Demand(1, 1), Lane.BACKGROUND, "b", 1)
    assert [t.state for t in (*mine, other)] == ["running", "running", "waiting", "running"]


def test_queue_is_bounded_for_all_for_background_and_for_a_key():
    queue = scheduler(None, max_in_flight=1)
    queue.submit(Demand(1, 1), Lane.INTERACTIVE, None, 0)
    for _ in range(4):
        queue.submit(Demand(1, 1), Lane.BACKGROUND, None, 0)
    with pytest.raises(RefusedError, match="queue_full"):
        queue.submit(Demand(1, 1), Lane.BACKGROUND, None, 0)
    for _ in range(4):
        queue.submit(Demand(1, 1), Lane.INTERACTIVE, "a", 0)
    with pytest.raises(RefusedError, match="queue_full"):
        queue.check_room(None)
    queue.refuse_waiting(Refusal.STALLED)
    for _ in range(4):
        queue.submit(Demand(1, 1), Lane.INTERACTIVE, "a", 0)
    with pytest.raises(RefusedError, match="key_limit"):
        queue.submit(Demand(1, 1), Lane.INTERACTIVE, "a", 0)


def test_patience_ends_with_the_queue_or_with_an_outage():
    queue = scheduler(None, max_in_flight=1)
    queue.submit(Demand(1, 1), Lane.INTERACTIVE, None, 0)
    old = queue.submit(Demand(1, 1), Lane.INTERACTIVE, None, 0)
    assert not queue.advance(599)
    assert queue.advance(600) == [old]
    assert old.refusal is Refusal.QUEUE_TIMEOUT
    held = queue.submit(Demand(1, 1), Lane.INTERACTIVE, None, 600)
    queue.close(700)
    late = queue.submit(Demand(1, 1), Lane.INTERACTIVE, None, 750)
    assert queue.advance(820) == [held], "an outage is waited for from its begin"
    assert queue.advance(870) == [late], "or from the request's"


@pytest.mark.parametrize(
    ("capacity", "fixed", "blocks"),
    [
        ((170, 58, 9776), 58, {1_000: 59, 32_000: 62, 128_000: 72, 250_000: 84}),
        ((171, 39, 12144), 39, {1_000: 40, 32_000: 42, 128_000: 50, 250_000: 60}),
    ],
)
def test_cost_in_blocks_of_the_published_builds(capacity, fixed, blocks):
    engine = Capacity(*capacity, 262_144, 4)
    assert {tokens: engine.cost_blocks(Demand(tokens, 0)) for tokens in blocks} == blocks
    assert engine.cost_blocks(Demand(250_000, 10**9)) == engine.cost_blocks(Demand(262_144, 0))
    assert engine.cost_blocks(Demand(250_000, 1, sequences=9)) == engine.budget_blocks


@pytest.mark.parametrize(
    "body",
    [None, [], {}, {"num_blocks": 1}, {**MTP_RELEASE.__dict__, "tokens_per_block": 0}]
    + [{**MTP_RELEASE.__dict__, name: bad} for name in MTP_RELEASE.__dict__ for bad in (-1, "7", True, None)],
)
def test_capacity_that_makes_no_sense_is_not_believed(body):
    assert parse_capacity(body) is None


def test_capacity_is_read():
    assert parse_capacity({**MTP_RELEASE.__dict__, "engine": "vllm"}) == MTP_RELEASE
