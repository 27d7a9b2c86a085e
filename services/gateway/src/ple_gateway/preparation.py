"""From what a client sent to what the engine gets."""

from dataclasses import dataclass
from typing import Any

import msgspec

from ple_gateway.engine import EngineCall
from ple_gateway.errors import GatewayError, invalid
from ple_gateway.images.pipeline import ImagePipeline
from ple_gateway.messages import Conversation
from ple_gateway.metrics import Metrics
from ple_gateway.models import ModelCatalogue
from ple_gateway.parameters import check_parameters
from ple_gateway.schemas import AnswerSchema, Schemas
from ple_gateway.settings import Settings

# The slowest prefill to be expected, cold and without prefetch, is 270 tokens a second.
_PREFILL_TOKENS_PER_S = 200
_BYTES_PER_TOKEN = 3.2  # code; prose has more
_PX_PER_TOKEN = 1024


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

    def __init__(
        self,
        settings: Settings,
        models: ModelCatalogue,
        images: ImagePipeline,
        schemas: Schemas,
        metrics: Metrics,
    ) -> None:
        self._settings = settings
        self._models = models
        self._images = images
        self._schemas = schemas
        self._metrics = metrics

    async def prepare(self, path: str, request: dict[str, Any]) -> Job:
        """Return the job for a request, which is rewritten in place; raises GatewayError 400 or 404.

        Cheap checks come first: no picture is decoded for a request that fails them.
        """
        check_parameters(request, self._settings.max_choices)
        conversation = _conversation(path, request)
        await self._models.choose(request)
        schema = await self._schema(request)
        images = await self._images.prepare(conversation.images) if conversation else []
        options = request.get("stream_options", {})
        if request.get("stream"):
            # Always asked for, for the metrics; the relay drops it when the client did not ask.
            request["stream_options"] = {**options, "include_usage": True}
        body = msgspec.json.encode(request)
        return Job(
            call=EngineCall(path, body),
            streamed=bool(request.get("stream")),
            include_usage=bool(options.get("include_usage")),
            choices=request.get("n", 1) * (1 if conversation else _count_prompts(request["prompt"])),
            schema=schema,
            may_be_empty=bool(request.get("stop") or request.get("stop_token_ids")),
            prefill_s=self._prefill_s(len(body) - sum(images), len(images)),
        )

    def _prefill_s(self, text_bytes: int, images: int) -> float:
        tokens = text_bytes / _BYTES_PER_TOKEN + images * self._settings.image_max_px / _PX_PER_TOKEN
        return tokens / _PREFILL_TOKENS_PER_S

    async def _schema(self, request: dict[str, Any]) -> AnswerSchema | None:
        try:
            return await self._schemas.prepare(request)
        except GatewayError:
            self._metrics.schemas_refused.inc()
            raise


def _conversation(path: str, request: dict[str, Any]) -> Conversation | None:
    """Check and rewrite messages or prompt, whichever the path takes."""
    if path.endswith("/chat/completions") or (path == "/tokenize" and "messages" in request):
        conversation = Conversation(request.get("messages"))
        request["messages"] = conversation.messages
        return conversation
    if not isinstance(request.get("prompt"), str | list) or request["prompt"] == []:
        raise invalid("`prompt` must be a string, a list of strings or a list of token ids.", param="prompt")
    return None


def _count_prompts(prompt: Any) -> int:
    """Count the prompts of a text completion: a list of token ids is one prompt."""
    if isinstance(prompt, list) and not isinstance(prompt[0], int):
        return len(prompt)
    return 1
