"""From what a client sent to what the engine gets."""

from dataclasses import dataclass
from typing import Any

import msgspec

from ple_gateway.engine import EngineCall
from ple_gateway.models import ModelCatalogue
from ple_gateway.schemas import AnswerSchema, answer_schema

# The slowest prefill to be expected, cold and without prefetch, is 270 tokens a second.
_PREFILL_TOKENS_PER_S = 200
_BYTES_PER_TOKEN = 3.2  # code; prose has more


@dataclass(frozen=True)
class Job:
    """One request, checked and ready for the engine."""

    call: EngineCall
    streamed: bool
    include_usage: bool
    choices: int
    schema: AnswerSchema | None
    may_be_empty: bool  # a stop string can end an answer before its first character
    prefill_s: float  # an upper estimate


class Preparation:
    """Checks and rewrites requests."""

    def __init__(self, models: ModelCatalogue) -> None:
        self._models = models

    async def prepare(self, path: str, request: dict[str, Any]) -> Job:
        """Return the job for a request; raises GatewayError 400 or 404."""
        await self._models.choose(request)
        schema = await answer_schema(request)
        streamed = bool(request.get("stream"))
        options = request.get("stream_options") or {}
        if streamed:
            # Always asked for, for the metrics; the relay drops it when the client did not ask.
            request["stream_options"] = {**options, "include_usage": True}
        body = msgspec.json.encode(request)
        return Job(
            call=EngineCall(path, body),
            streamed=streamed,
            include_usage=bool(options.get("include_usage")),
            choices=int(request.get("n") or 1) * _prompts(request.get("prompt")),
            schema=schema,
            may_be_empty=bool(request.get("stop")),
            prefill_s=len(body) / _BYTES_PER_TOKEN / _PREFILL_TOKENS_PER_S,
        )


def _prompts(prompt: Any) -> int:
    """Count the prompts of a text completion: a list of token ids is one prompt."""
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        return len(prompt)
    return 1
