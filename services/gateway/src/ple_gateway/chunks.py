"""What the relay changes in the engine's chunks, and what it learns from them."""

import json
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ple_gateway.blanks import MAX_BLANKS, BlankWatch
from ple_gateway.engine_errors import from_engine_frame
from ple_gateway.errors import GatewayError, backend_lost
from ple_gateway.schemas import AnswerSchema

_ENCODER = msgspec.json.Encoder()


@dataclass
class _Choice:
    text: list[str] = field(default_factory=list)  # kept only when a schema will be checked
    blanks: BlankWatch = field(default_factory=BlankWatch)
    produced: bool = False
    finished: bool = False


class ChunkRelay:
    """Rewrites the chunks of one stream, one at a time.

    Usage appears only when the client asked for it; reasoning has both of its names; an answer that misses
    its schema, or is empty, never ends as a success.
    """

    def __init__(
        self, *, expected_choices: int, include_usage: bool, schema: AnswerSchema | None, may_be_empty: bool
    ) -> None:
        self._expected_choices = expected_choices
        self._include_usage = include_usage
        self._schema = schema
        self._may_be_empty = may_be_empty
        self._choices: dict[int, _Choice] = {}
        self.usage: dict[str, Any] | None = None

    async def rewrite(self, data: bytes) -> bytes | None:
        """Return the chunk to send on, None for one the client did not ask for; raises GatewayError."""
        chunk, data = _decode(data)
        if chunk.get("error"):
            raise from_engine_frame(chunk["error"])
        if chunk.get("choices") is None:
            chunk["choices"] = []
            data = b""
        for choice in chunk["choices"]:
            if await self._take(choice):
                data = b""
        return self._with_usage(chunk, data)

    def _with_usage(self, chunk: dict[str, Any], data: bytes) -> bytes | None:
        """Encode the chunk, or keep its bytes when nothing has to change."""
        usage = chunk.get("usage")
        if usage:
            self.usage = usage
        if self._include_usage:
            if "usage" not in chunk:
                chunk["usage"] = None
                data = b""
        elif "usage" in chunk:
            if usage and not chunk["choices"]:
                return None
            del chunk["usage"]
            data = b""
        # Several data lines may make up one event; a relayed event has one.
        return data if data and b"\n" not in data and b"\r" not in data else _ENCODER.encode(chunk)

    async def _take(self, choice: dict[str, Any]) -> bool:
        """Note a choice's delta; whether it was changed."""
        state = self._choices.setdefault(choice.get("index", 0), _Choice())
        delta = choice.get("delta")
        changed = name_reasoning_twice(delta) if isinstance(delta, dict) else False
        parts = delta if isinstance(delta, dict) else choice
        text = parts.get("content") or parts.get("text") or ""
        if text or parts.get("reasoning") or parts.get("tool_calls") or parts.get("refusal"):
            state.produced = True
        if self._schema and isinstance(text, str):
            state.text.append(text)
            if state.blanks.runs_away(text):
                raise endless_blanks()
        if choice.get("finish_reason"):
            await self._finish(state, choice["finish_reason"])
        return changed

    async def _finish(self, state: _Choice, reason: str) -> None:
        if reason == "stop" and not state.produced and not self._may_be_empty:
            raise empty_answer()
        if reason == "stop" and self._schema:
            await self._schema.check_answer("".join(state.text))
        state.finished = True

    def check_complete(self) -> None:
        """Raise GatewayError unless every choice has finished."""
        if sum(choice.finished for choice in self._choices.values()) < self._expected_choices:
            raise backend_lost("The engine ended the stream before the answer was complete.")


def name_reasoning_twice(message: dict[str, Any]) -> bool:
    """Give `reasoning` its other common name too, and the other way round; whether anything changed."""
    reasoning = message.get("reasoning")
    other = message.get("reasoning_content")
    if reasoning is not None and "reasoning_content" not in message:
        message["reasoning_content"] = reasoning
        return True
    if other is not None and "reasoning" not in message:
        message["reasoning"] = other
        return True
    return False


def empty_answer() -> GatewayError:
    """Return the error for an engine that said it was done and produced nothing."""
    return GatewayError(502, "The engine produced an empty answer.", code="empty_answer")


def endless_blanks() -> GatewayError:
    """Return the error for an engine that writes blanks where JSON should go on."""
    return GatewayError(
        502, f"The engine wrote more than {MAX_BLANKS} blanks in a row in its JSON.", code="endless_blanks"
    )


def _decode(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the chunk, and its bytes if they can be sent on as they are."""
    try:
        chunk = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError):
        chunk, data = _decode_broken(data), b""
    if not isinstance(chunk, dict) or not isinstance(chunk.get("choices", []), list | None):
        raise backend_lost("The engine sent an event that is no chunk.")
    return chunk, data


def _decode_broken(data: bytes) -> Any:
    """Parse what a strict parser refuses: cut UTF-8 becomes U+FFFD, lone surrogates too."""
    try:
        text = json.dumps(json.loads(data.decode("utf-8", "replace"), strict=False), ensure_ascii=False)
        return msgspec.json.decode(text.encode("utf-8", "replace"))
    except (ValueError, RecursionError, msgspec.DecodeError) as exc:
        raise backend_lost("The engine sent an event that is no JSON.") from exc
