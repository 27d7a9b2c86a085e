"""What generates: the whole life of a request, whatever dialect its client speaks."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ple_gateway import sse
from ple_gateway.answers import checked_answer
from ple_gateway.body import BodyReader, ClientLeftError
from ple_gateway.chunks import ChunkRelay
from ple_gateway.dialect import AnswerEvents, Dialect, Speak
from ple_gateway.disconnect import until_disconnect
from ple_gateway.duplicates import Duplicates
from ple_gateway.engine import Engine
from ple_gateway.errors import GatewayError, backend_lost
from ple_gateway.exchange import Exchange, exchange_of
from ple_gateway.gate import Gate
from ple_gateway.metrics import Metrics
from ple_gateway.preparation import Job, Preparation
from ple_gateway.relay import EventStream, serve_events
from ple_gateway.settings import Settings
from ple_gateway.stages import Prefill, StageClock, StageClocks
from ple_gateway.upstream import UpstreamError

_END_TIMEOUT_S = 0.2
_WORTH_A_RETRY = {"empty_answer", "schema_violation"}
_REJECTED = {*_WORTH_A_RETRY, "endless_blanks"}


class Generation:
    """An ASGI endpoint. One coroutine holds all that a request occupies, so that its end frees everything."""

    def __init__(
        self,
        settings: Settings,
        bodies: BodyReader,
        preparation: Preparation,
        gate: Gate,
        engine: Engine,
        clocks: StageClocks,
        metrics: Metrics,
        speak: Speak,
    ) -> None:
        self._settings = settings
        self._bodies = bodies
        self._preparation = preparation
        self._gate = gate
        self._engine = engine
        self._clocks = clocks
        self._metrics = metrics
        self._prefills = clocks.prefills
        self._duplicates = Duplicates()
        self._speak = speak

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = exchange_of(scope)
        try:
            with self._gate.ticket(exchange), self._bodies.holding() as held:
                request = await self._bodies.read_object(held, scope, receive)
                exchange.stage = "preparation"
                work = self._once(scope, held.digest, request, receive, send)
                await until_disconnect(receive, work)
        except ClientLeftError:
            exchange.outcome = "client_left"
            self._metrics.disconnects.labels(exchange.stage).inc()

    async def _once(
        self, scope: Scope, digest: bytes, request: dict[str, Any], receive: Receive, send: Send
    ) -> None:
        async with self._duplicates.serving(scope, digest):
            dialect = self._speak(scope["path"], request)
            await self._serve(scope, dialect, receive, send, exchange_of(scope))

    async def _serve(
        self, scope: Scope, dialect: Dialect, receive: Receive, send: Send, exchange: Exchange
    ) -> None:
        job = await self._preparation.prepare(dialect.path, dialect.request, dialect.origins)
        exchange.headers |= job.expected.schema.headers if job.expected.schema else {}
        if job.streamed:
            await self._stream(job, dialect.events(), send, exchange)
        else:
            answer = dialect.answer(await self._answer(job, exchange))
            response = Response(msgspec.json.encode(answer), media_type="application/json")
            await response(scope, receive, send)

    async def _stream(self, job: Job, events: AnswerEvents, send: Send, exchange: Exchange) -> None:
        stream = EventStream(send, events, self._metrics)
        async with stream.kept_alive(self._settings.commit_delay_s, self._settings.keepalive_interval_s):
            error = await serve_events(stream, self._relay(job, events, stream, exchange))
        if error:
            exchange.outcome = "stream_failed"
            exchange.error = error.code or error.type
            self._note_rejection(error)

    async def _relay(self, job: Job, events: AnswerEvents, stream: EventStream, exchange: Exchange) -> None:
        async with self._clocks.running(exchange) as clock:
            lost = True
            while lost:  # found gone before it took anything, the engine is waited for
                clock.enter("queue", self._settings.total_timeout_s)
                async with self._gate.place(job.demand, job.lane, exchange, patient=True) as place:
                    with self._prefills.running(job.prefill_s) as prefill:
                        await self._relay_answer(job, events, stream, clock, prefill, exchange)
                lost = place.lost

    async def _relay_answer(
        self,
        job: Job,
        events: AnswerEvents,
        stream: EventStream,
        clock: StageClock,
        prefill: Prefill,
        exchange: Exchange,
    ) -> None:
        clock.enter("headers", self._settings.headers_timeout_s)
        async with self._engine.stream(job.call, exchange) as raw:
            await stream.open()
            clock.enter("first_token", self._settings.first_token_timeout_s + prefill.backlog_s)
            chunks = ChunkRelay(
                job.expected,
                expected_choices=job.choices,
                include_usage=job.include_usage,
                model=job.model,
                note=self._note_repair,
            )
            try:
                await self._relay_events(raw, chunks, events, stream, clock, prefill, exchange)
            except sse.EventTooLargeError as exc:
                raise backend_lost("The engine sent an event that is too large.") from exc
            await _read_to_end(raw)
        self._count_tokens(chunks.usage)

    async def _relay_events(
        self,
        raw: AsyncIterator[bytes],
        chunks: ChunkRelay,
        events: AnswerEvents,
        stream: EventStream,
        clock: StageClock,
        prefill: Prefill,
        exchange: Exchange,
    ) -> None:
        last_s = exchange.started_s
        async for data in sse.split_events(raw, self._settings.max_event_bytes):
            if data == sse.DONE:
                chunks.check_complete()
                return
            chunk = await chunks.rewrite(data)
            frames = events.chunk(chunk) if chunk else b""
            if frames:
                await stream.event(frames)
            self._gate.events_relayed += 1
            if exchange.first_token_s is None and chunk and not chunk.has_token:
                continue  # some engines tell the role before they read the prompt
            now_s = time.monotonic()
            if exchange.first_token_s is None:
                prefill.end()
                exchange.first_token_s = now_s - exchange.started_s
                self._metrics.first_token.observe(exchange.first_token_s)
            else:
                self._metrics.between_tokens.observe(now_s - last_s)
            last_s = now_s
            clock.enter("between_tokens", self._settings.between_tokens_timeout_s)
        raise backend_lost("The engine ended the stream before the answer was complete.")

    async def _answer(self, job: Job, exchange: Exchange) -> dict[str, Any]:
        exchange.stage = "queue"
        async with (
            self._clocks.running(exchange) as clock,
            self._gate.place(job.demand, job.lane, exchange, patient=False),
        ):
            clock.enter("answer", self._settings.total_timeout_s)
            try:
                answer = await self._ask(job, exchange)
            except GatewayError as error:
                if error.code not in _WORTH_A_RETRY:
                    raise
                self._metrics.semantic_retries.inc()
                answer = await self._ask(job, exchange)
        self._count_tokens(answer.get("usage"))
        return answer

    async def _ask(self, job: Job, exchange: Exchange) -> dict[str, Any]:
        body = await self._engine.post(job.call, exchange)
        try:
            return await checked_answer(body, job.expected, job.model, self._note_repair)
        except GatewayError as error:
            self._note_rejection(error)
            raise

    def _note_rejection(self, error: GatewayError) -> None:
        if error.code in _REJECTED:
            self._metrics.answers_rejected.labels(error.code).inc()

    def _note_repair(self, kind: str) -> None:
        self._metrics.answer_repairs.labels(kind).inc()

    def _count_tokens(self, usage: dict[str, Any] | None) -> None:
        usage = usage or {}
        details = usage.get("prompt_tokens_details") or {}
        counts = {
            "prompt": usage.get("prompt_tokens"),
            "completion": usage.get("completion_tokens"),
            "cached": details.get("cached_tokens") if isinstance(details, dict) else None,
        }
        for kind, count in counts.items():
            if isinstance(count, int) and count > 0:
                self._metrics.tokens.labels(kind).inc(count)


async def _read_to_end(raw: AsyncIterator[bytes]) -> None:
    """Let the engine finish its response, so that the connection can be used again; but do not wait long."""
    with suppress(TimeoutError, UpstreamError):  # the answer is complete, whatever happens now
        async with asyncio.timeout(_END_TIMEOUT_S):
            async for _ in raw:
                pass
