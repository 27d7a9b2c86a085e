"""`POST /tokenize` and `/v1/messages/count_tokens`: the engine's own count of a prompt or of messages."""

from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ple_gateway.body import BodyReader, ClientLeftError
from ple_gateway.dialect import Speak
from ple_gateway.disconnect import until_disconnect
from ple_gateway.engine import Engine, EngineCall
from ple_gateway.errors import backend_lost
from ple_gateway.exchange import Exchange, exchange_of
from ple_gateway.gate import Gate
from ple_gateway.preparation import Preparation
from ple_gateway.stages import StageClocks

_LIMIT_S = 60.0


class Tokenization:
    """An ASGI endpoint: checked like a chat request, answered in one piece."""

    def __init__(
        self,
        bodies: BodyReader,
        preparation: Preparation,
        gate: Gate,
        engine: Engine,
        clocks: StageClocks,
        speak: Speak,
    ) -> None:
        self._bodies = bodies
        self._preparation = preparation
        self._gate = gate
        self._engine = engine
        self._clocks = clocks
        self._speak = speak

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = exchange_of(scope)
        try:
            with self._gate.ticket(exchange), self._bodies.holding() as held:
                request = await self._bodies.read_object(held, scope, receive)
                dialect = self._speak(scope["path"], request)
                job = await self._preparation.prepare(dialect.path, dialect.request, dialect.origins)
                answer = dialect.answer(await until_disconnect(receive, self._ask(job.call, exchange)))
                response = Response(msgspec.json.encode(answer), media_type="application/json")
                await response(scope, receive, send)
        except ClientLeftError:
            exchange.outcome = "client_left"

    async def _ask(self, call: EngineCall, exchange: Exchange) -> dict[str, Any]:
        async with self._clocks.running(exchange) as clock:
            clock.enter("answer", _LIMIT_S)
            body = await self._engine.post(call, exchange)
        try:
            answer = msgspec.json.decode(body)
        except (msgspec.DecodeError, RecursionError) as exc:
            raise backend_lost("The engine's answer is no JSON.") from exc
        if not isinstance(answer, dict):
            raise backend_lost("The engine's answer is no count.")
        return answer
