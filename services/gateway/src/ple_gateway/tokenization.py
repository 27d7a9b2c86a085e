"""`POST /tokenize`: the engine's own count of a prompt or of messages."""

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ple_gateway.body import BodyReader, ClientLeftError
from ple_gateway.disconnect import until_disconnect
from ple_gateway.engine import Engine, EngineCall
from ple_gateway.exchange import Exchange, exchange_of
from ple_gateway.gate import Gate
from ple_gateway.preparation import Preparation
from ple_gateway.stages import StageClocks

_LIMIT_S = 60.0


class Tokenization:
    """An ASGI endpoint: checked like a chat request, answered in one piece."""

    def __init__(
        self, bodies: BodyReader, preparation: Preparation, gate: Gate, engine: Engine, clocks: StageClocks
    ) -> None:
        self._bodies = bodies
        self._preparation = preparation
        self._gate = gate
        self._engine = engine
        self._clocks = clocks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = exchange_of(scope)
        try:
            with self._gate.ticket(exchange), self._bodies.holding() as held:
                request = await self._bodies.read_object(held, scope, receive)
                job = await self._preparation.prepare(scope["path"], request)
                answer = await until_disconnect(receive, self._ask(job.call, exchange))
                await Response(answer, media_type="application/json")(scope, receive, send)
        except ClientLeftError:
            exchange.outcome = "client_left"

    async def _ask(self, call: EngineCall, exchange: Exchange) -> bytes:
        async with self._clocks.running(exchange) as clock:
            clock.enter("answer", _LIMIT_S)
            return await self._engine.post(call, exchange)
