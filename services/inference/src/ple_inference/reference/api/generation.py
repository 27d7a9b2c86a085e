"""One request's sequences on the engine, seen from the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field, replace

from fastapi import Request

from ple_inference.metrics import Metrics
from ple_inference.reference.api.errors import as_api_error, bad_request
from ple_inference.reference.grammar import GrammarState
from ple_inference.reference.sampling import SamplingParams
from ple_inference.reference.sequence import Delta, Ending, Event, Failed, Finished, Prompt, Sequence
from ple_inference.reference.service import Service


class ClientGoneError(Exception):
    """The client closed the connection before its answer was complete."""


@dataclass
class Usage:
    """Tokens of one request, summed over its choices."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0

    def as_json(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }


@dataclass(frozen=True)
class Job:
    """One choice to be made: a prompt and how to continue it."""

    prompt: Prompt
    params: SamplingParams
    new_grammar: Callable[[], GrammarState] | None = None
    thinking: bool = False


def choices_of(job: Job, count: int) -> list[Job]:
    """`count` choices of one prompt; a seed gives each its own, the same every time."""
    seed = job.params.seed
    seeds = [None if seed is None else seed + place for place in range(count)]
    return [replace(job, params=replace(job.params, seed=s)) for s in seeds]


@dataclass
class _Pace:
    """When a sequence's last token came."""

    submitted: float
    last: float | None = None

    def token(self, metrics: Metrics) -> None:
        now = time.monotonic()
        if self.last is None:
            metrics.ttft_s.observe(now - self.submitted)
        else:
            metrics.inter_token_s.observe(now - self.last)
        self.last = now


@dataclass
class Generation:
    """Submitted choices of one request. `events` must be run to its end, or `cancel` be called."""

    service: Service
    metrics: Metrics
    jobs: list[Job]
    usage: Usage = field(default_factory=Usage)

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        # Bounded by max_tokens of each choice: a slow reader costs its own answer's size.
        self._events: asyncio.Queue[tuple[int, Event] | None] = asyncio.Queue()
        self._sequences: list[Sequence] = []
        self.outcome = "cancelled"

    def submit(self) -> None:
        """Queue every choice. Raises ApiError when the engine is full."""
        service = self.service
        think_end = service.vocabulary.id_of("</think>")
        name = uuid.uuid4().hex
        for index, job in enumerate(self.jobs):
            ending = Ending(service.checkpoint.eos_token_ids, think_end if job.thinking else None)
            sequence = Sequence(
                f"{name}-{index}",
                job.prompt,
                job.params,
                vocabulary=service.vocabulary,
                ending=ending,
                grammar=job.new_grammar() if job.new_grammar else None,
                deliver=self._deliver_as(index),
            )
            self._sequences.append(sequence)
        try:
            service.engine.submit(self._sequences)
        except Exception as error:
            self.metrics.requests.labels("rejected").inc()
            raise as_api_error(error) from error
        prompts = {id(job.prompt): len(job.prompt.tokens) for job in self.jobs}
        self.usage.prompt_tokens = sum(prompts.values())
        self.metrics.prompt_tokens.inc(self.usage.prompt_tokens)

    def _deliver_as(self, index: int) -> Callable[[Event], None]:
        def deliver(event: Event) -> None:
            # The loop is closed when the process stops with an answer still running.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

        return deliver

    async def events(self, request: Request) -> AsyncGenerator[tuple[int, Delta | Finished]]:
        """Deltas and ends of all choices as they come.

        Raises ApiError when one fails and ClientGoneError when the client is gone; both end all choices.
        """
        watch = asyncio.create_task(self._watch(request))
        paces = [_Pace(time.monotonic()) for _ in self.jobs]
        open_choices = len(self.jobs)
        try:
            while open_choices:
                item = await self._events.get()
                if item is None:
                    raise ClientGoneError
                index, event = item
                if isinstance(event, Failed):
                    self.outcome = "error"
                    raise as_api_error(event.error) from event.error
                self._count(event, paces[index])
                open_choices -= isinstance(event, Finished)
                yield index, event
        finally:
            watch.cancel()
            self.cancel()
            self.metrics.requests.labels(self.outcome).inc()

    def _count(self, event: Delta | Finished, pace: _Pace) -> None:
        if isinstance(event, Delta):
            pace.token(self.metrics)
            return
        self.outcome = event.reason
        self.usage.completion_tokens += event.completion_tokens
        self.usage.reasoning_tokens += event.reasoning_tokens
        self.metrics.generation_tokens.inc(event.completion_tokens)

    async def _watch(self, request: Request) -> None:
        """Notice a client that hangs up, also while no token comes."""
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self._events.put_nowait(None)

    def cancel(self) -> None:
        for sequence in self._sequences:
            sequence.cancel()


def room_for(prompt: Prompt, service: Service, param: str) -> int:
    """Tokens that may follow the prompt. Raises ApiError when there are none."""
    room = service.max_model_len - len(prompt.tokens)
    if room < 1:
        raise bad_request(
            f"This model's maximum context length is {service.max_model_len} tokens. However, your request "
            f"has {len(prompt.tokens)} input tokens. Please reduce the length of the input messages.",
            param,
            "context_length_exceeded",
        )
    return room
