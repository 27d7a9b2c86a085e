"""From what a client sent to what the engine gets."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ple_gateway.capacity import Demand
from ple_gateway.choice import Expected
from ple_gateway.engine import EngineCall
from ple_gateway.errors import GatewayError, invalid
from ple_gateway.estimate import Estimator, guess_lane
from ple_gateway.images.pipeline import ImagePipeline
from ple_gateway.messages import Conversation, Origin
from ple_gateway.metrics import Metrics
from ple_gateway.models import ModelCatalogue
from ple_gateway.parameters import check_parameters
from ple_gateway.scheduler import Lane
from ple_gateway.schemas import AnswerSchema, Schemas
from ple_gateway.settings import Settings

# The slowest prefill to be expected, cold and without prefetch, is 270 tokens a second.
_PREFILL_TOKENS_PER_S = 200
_MANY_MESSAGES = 500  # worth a thread


@dataclass(frozen=True)
class Job:
    """One request, checked and ready for the engine."""

    call: EngineCall
    streamed: bool
    include_usage: bool
    choices: int
    expected: Expected
    model: str | None  # as the client named it
    prefill_s: float  # an upper estimate
    demand: Demand
    lane: Lane


class Preparation:
    """Checks and rewrites requests."""

    def __init__(
        self,
        settings: Settings,
        models: ModelCatalogue,
        images: ImagePipeline,
        schemas: Schemas,
        estimator: Estimator,
        metrics: Metrics,
    ) -> None:
        self._settings = settings
        self._models = models
        self._images = images
        self._schemas = schemas
        self._estimator = estimator
        self._metrics = metrics

    async def prepare(
        self, path: str, request: dict[str, Any], origins: Sequence[Origin] | None = None
    ) -> Job:
        """Return the job for a request, which is rewritten in place; raises GatewayError 400 or 404.

        Cheap checks come first: no picture is decoded for a request that fails them. `origins` say how the
        client calls its messages, where the request was made from another form.
        """
        check_parameters(request, self._settings.max_choices)
        messages = request.get("messages")
        if isinstance(messages, list) and len(messages) > _MANY_MESSAGES:
            conversation = await asyncio.to_thread(_conversation, path, request, origins)
        else:
            conversation = _conversation(path, request, origins)
        await self._models.choose(request)
        self._clamp_tokens(request)
        schema = await self._schema(request)
        images = await self._images.prepare(conversation.images) if conversation else []
        options = request.get("stream_options", {})
        if request.get("stream"):
            # Always asked for, for the metrics; the relay drops it when the client did not ask.
            request["stream_options"] = {**options, "include_usage": True}
        body = msgspec.json.encode(request)
        sequences = request.get("n", 1) * (1 if conversation else _count_prompts(request["prompt"]))
        demand = Demand(0, 0, sequences)
        if path != "/tokenize":  # there nothing is generated
            messages = conversation.messages if conversation else []
            text_bytes = len(body) - sum(images)
            demand = await self._estimator.demand(request, messages, text_bytes, sequences)
        return Job(
            call=EngineCall(path, body),
            streamed=bool(request.get("stream")),
            include_usage=bool(options.get("include_usage")),
            choices=sequences,
            expected=Expected(
                schema=schema,
                may_be_empty=bool(request.get("stop") or request.get("stop_token_ids")),
                tools=_callable_tools(request),
                repair_markup=self._settings.tool_markup == "repair",
            ),
            model=request.get("model"),
            prefill_s=demand.prompt_tokens / _PREFILL_TOKENS_PER_S,
            demand=demand,
            lane=guess_lane(request),
        )

    def _clamp_tokens(self, request: dict[str, Any]) -> None:
        """Agents ask for more tokens than the window has; some engines refuse that."""
        window = self._models.window_of(request.get("model"))
        for name in ("max_tokens", "max_completion_tokens"):
            if window and request.get(name, 0) > window:
                request[name] = window

    async def _schema(self, request: dict[str, Any]) -> AnswerSchema | None:
        try:
            return await self._schemas.prepare(request)
        except GatewayError:
            self._metrics.schemas_refused.inc()
            raise


def _conversation(
    path: str, request: dict[str, Any], origins: Sequence[Origin] | None
) -> Conversation | None:
    """Check and rewrite messages or prompt, whichever the path takes."""
    if path.endswith("/chat/completions") or (path == "/tokenize" and "messages" in request):
        conversation = Conversation(request.get("messages"), origins)
        request["messages"] = conversation.messages
        return conversation
    if not isinstance(request.get("prompt"), str | list) or request["prompt"] == []:
        raise invalid("`prompt` must be a string, a list of strings or a list of token ids.", param="prompt")
    return None


def _callable_tools(request: dict[str, Any]) -> dict[str, Any]:
    if request.get("tool_choice") == "none":
        return {}
    functions = [tool["function"] for tool in request.get("tools", [])]
    return {function["name"]: function.get("parameters") or {} for function in functions}


def _count_prompts(prompt: Any) -> int:
    """Count the prompts of a text completion: a list of token ids is one prompt."""
    return len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1
