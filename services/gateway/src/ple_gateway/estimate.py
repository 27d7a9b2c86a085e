"""How many tokens a request will occupy, before the engine is asked for anything that costs it a prefill."""

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from ple_gateway.capacity import Capacity, Demand
from ple_gateway.engine import Engine, EngineCall
from ple_gateway.errors import GatewayError, invalid
from ple_gateway.images.size import picture_px
from ple_gateway.scheduler import Lane

_BYTES_PER_TOKEN = 3.2  # code; prose has more
_PX_PER_TOKEN = 1024
_NEAR = 0.85  # of a boundary: from here on a guess is not good enough
_SMALL_ANSWER_TOKENS = 1024
_COUNT_TIMEOUT_S = 20.0
_COUNTED_FIELDS = ("model", "messages", "tools", "chat_template_kwargs")


class Estimator:
    """Guesses from sizes; asks the engine's tokenizer only near a boundary, and before a refusal."""

    def __init__(
        self,
        engine: Engine,
        capacity: Callable[[], Capacity | None],
        *,
        reserved_answer_tokens: int,
        image_max_px: int,
    ) -> None:
        self._engine = engine
        self._capacity = capacity
        self._reserved_answer_tokens = reserved_answer_tokens
        self._image_max_px = image_max_px

    def guess(self, request: dict[str, Any], text_bytes: int) -> int:
        """Guess a prompt's tokens: those of `text_bytes` of JSON, and those of its pictures."""
        return _text_tokens(text_bytes) + self._picture_tokens(request)

    async def demand(self, request: dict[str, Any], text_bytes: int, sequences: int) -> Demand:
        """Return what the request needs. Raises 400 `context_length_exceeded` for one that can never fit."""
        picture_tokens = self._picture_tokens(request)
        prompts = _text_prompts(request)
        text_tokens = max(map(_prompt_tokens, prompts)) if prompts else _text_tokens(text_bytes)
        capacity = self._capacity()
        if capacity and text_tokens + picture_tokens >= _NEAR * _nearest_boundary(capacity):
            counted = await self._count(request, prompts)
            if counted is not None:
                text_tokens = counted
                _check_fits(counted, capacity, "prompt" if prompts else "messages")
        allowed = request.get(
            "max_completion_tokens", request.get("max_tokens", self._reserved_answer_tokens)
        )
        answer_tokens = min(allowed, self._reserved_answer_tokens)
        return Demand(text_tokens + picture_tokens, answer_tokens, sequences)

    def _picture_tokens(self, request: dict[str, Any]) -> int:
        pixels = (picture_px(url) or self._image_max_px for url in _picture_urls(request))
        return sum(-(-px // _PX_PER_TOKEN) for px in pixels)

    async def _count(self, request: dict[str, Any], prompts: list[Any]) -> int | None:
        """Count the text's tokens by the engine; None when it does not tell."""
        if not prompts:
            return await self._ask(_without_pictures(request))
        longest = max(prompts, key=_prompt_tokens)
        if isinstance(longest, list):
            return len(longest)
        return await self._ask({"model": request.get("model"), "prompt": longest})

    async def _ask(self, question: dict[str, Any]) -> int | None:
        call = EngineCall("/tokenize", msgspec.json.encode(question))
        try:
            count = msgspec.json.decode(await self._engine.ask(call, _COUNT_TIMEOUT_S)).get("count")
        except (GatewayError, TimeoutError, msgspec.DecodeError, AttributeError):
            return None
        return count if isinstance(count, int) and not isinstance(count, bool) else None


def guess_lane(request: dict[str, Any]) -> Lane:
    """Tell people who wait from programs that do not: by what they ask for."""
    if request.get("tools") or request.get("stream"):
        return Lane.INTERACTIVE
    allowed = request.get("max_completion_tokens", request.get("max_tokens"))
    small = allowed is not None and allowed <= _SMALL_ANSWER_TOKENS
    shaped = request.get("response_format", {}).get("type", "text") != "text"
    return Lane.BACKGROUND if small or shaped else Lane.INTERACTIVE


def _text_tokens(text_bytes: int) -> int:
    return round(text_bytes / _BYTES_PER_TOKEN)


def _prompt_tokens(prompt: str | list[Any]) -> int:
    if isinstance(prompt, list):
        return len(prompt)
    return _text_tokens(len(prompt.encode("utf-8", "replace")))


def _picture_urls(request: dict[str, Any]) -> Iterator[str]:
    for message in request.get("messages", ()):
        content = message.get("content")
        if isinstance(content, list):
            yield from (part["image_url"]["url"] for part in content if part.get("type") == "image_url")


def _text_prompts(request: dict[str, Any]) -> list[str | list[Any]]:
    """List the prompts of a text completion; one of token ids is a list."""
    if "messages" in request:
        return []
    prompt = request["prompt"]
    return prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]


def _nearest_boundary(capacity: Capacity) -> int:
    budget = (capacity.budget_blocks - capacity.fixed_blocks_per_request) * capacity.tokens_per_block
    return min(capacity.longest_tokens, max(0, budget))


def _check_fits(prompt_tokens: int, capacity: Capacity, param: str) -> None:
    # A prompt that fills the window leaves no room for a first token.
    if prompt_tokens >= capacity.longest_tokens:
        raise invalid(
            f"This model's maximum context length is {capacity.longest_tokens} tokens. However, your "
            f"request has {prompt_tokens} input tokens. Please reduce the length of the {param}.",
            param=param,
            code="context_length_exceeded",
        )


def _without_pictures(request: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that make up the prompt's text."""
    question = {name: request[name] for name in _COUNTED_FIELDS if name in request}
    question["messages"] = [
        message | {"content": [part for part in message["content"] if part.get("type") != "image_url"]}
        if isinstance(message.get("content"), list)
        else message
        for message in request["messages"]
    ]
    return question
