"""What the relay changes in the engine's chunks, and what it learns from them."""

import json
import time
import uuid
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import msgspec

from ple_gateway.blanks import MAX_BLANKS, BlankWatch
from ple_gateway.choice import ChoiceRelay, Expected
from ple_gateway.engine_errors import from_engine_frame
from ple_gateway.errors import GatewayError, backend_lost
from ple_gateway.tool_calls import Note

_ENCODER = msgspec.json.Encoder()


@dataclass(frozen=True)
class Chunk:
    """One chunk for the client; `data` is its JSON as the engine wrote it, empty when it was changed."""

    fields: dict[str, Any]
    data: bytes

    @property
    def has_token(self) -> bool:
        """Whether there is more to it than a role."""
        for choice in self.fields["choices"]:
            delta = choice.get("delta")
            said = delta if isinstance(delta, dict) else {}
            if choice.get("finish_reason") or choice.get("text"):
                return True
            if any(value for name, value in said.items() if name != "role"):
                return True
        return not self.fields["choices"]

    def encoded(self) -> bytes:
        """Return the chunk as JSON on one line."""
        # Several data lines may make up one event; a relayed event has one.
        if self.data and b"\n" not in self.data and b"\r" not in self.data:
            return self.data
        return _ENCODER.encode(self.fields)


class ChunkRelay:
    """Rewrites the chunks of one stream, one at a time.

    All have the first one's identity. Usage appears only when the client asked for it. An answer that
    misses its schema, or is empty, never ends as a success.
    """

    def __init__(
        self, expected: Expected, *, expected_choices: int, include_usage: bool, model: str | None, note: Note
    ) -> None:
        self._expected = expected
        self._expected_choices = expected_choices
        self._include_usage = include_usage
        self._model = model
        self._note = note
        self._head: dict[str, Any] | None = None
        self._choices: dict[int, ChoiceRelay] = {}
        self._blanks: defaultdict[int, BlankWatch] = defaultdict(BlankWatch)
        self.usage: dict[str, Any] | None = None

    async def rewrite(self, data: bytes) -> Chunk | None:
        """Return the chunk to send on, None for one that has nothing for the client; raises GatewayError."""
        chunk, data = _decode(data)
        if chunk.get("error"):
            raise from_engine_frame(chunk["error"])
        changed = self._put_head(chunk)
        if chunk.get("choices") is None:
            chunk["choices"] = []
            changed = True
        for choice in chunk["choices"]:
            changed = await self._take(choice) or changed
        if changed:
            data = b""
        return self._with_usage(chunk, data)

    async def _take(self, choice: dict[str, Any]) -> bool:
        index = choice.get("index")
        if not isinstance(index, int):
            index = choice["index"] = 0
        if index not in self._choices:
            self._choices[index] = ChoiceRelay(self._expected, self._note)
        if self._expected.schema:
            self._stop_blanks(choice, self._blanks[index])
        return await self._choices[index].take(choice)

    def _stop_blanks(self, choice: dict[str, Any], blanks: BlankWatch) -> None:
        delta = choice.get("delta")
        text = delta.get("content") if isinstance(delta, dict) else choice.get("text")
        if isinstance(text, str) and blanks.runs_away(text):
            raise endless_blanks()

    def _put_head(self, chunk: dict[str, Any]) -> bool:
        if self._head is None:
            self._head = head_of(chunk, self._model)
        changed = False
        for name, value in self._head.items():
            if chunk.get(name) != value:
                chunk[name] = value
                changed = True
        return changed

    def _with_usage(self, chunk: dict[str, Any], data: bytes) -> Chunk | None:
        """Add or drop usage; keep the chunk's bytes when nothing has to change."""
        usage = chunk.get("usage")
        if isinstance(usage, dict):
            self.usage = usage
        elif usage is not None:
            del chunk["usage"]
            data = b""
        if self._include_usage:
            if "usage" not in chunk:
                chunk["usage"] = None
                data = b""
            elif isinstance(usage, dict) and complete_usage(usage):
                data = b""
        elif "usage" in chunk:
            if usage and not chunk["choices"]:
                return None
            del chunk["usage"]
            data = b""
        return Chunk(chunk, data)

    def check_complete(self) -> None:
        """Raise GatewayError unless every choice has finished."""
        if sum(choice.finished for choice in self._choices.values()) < self._expected_choices:
            raise backend_lost("The engine ended the stream before the answer was complete.")


def head_of(answer: dict[str, Any], model: str | None) -> dict[str, Any]:
    """Return id, created and model as clients expect them; `model` is the name that was asked for."""
    prefix = "cmpl-" if answer.get("object") == "text_completion" else "chatcmpl-"
    name = answer.get("id")
    name = name if isinstance(name, str) and name else uuid.uuid4().hex
    created = answer.get("created")
    return {
        "id": name if name.startswith(prefix) else prefix + name,
        "created": created if isinstance(created, int) else int(time.time()),
        "model": model or str(answer.get("model") or ""),
    }


def complete_usage(usage: dict[str, Any]) -> bool:
    """Make totals add up and details be there (0 where the engine tells none); whether anything changed."""
    before = msgspec.json.encode(usage)
    prompt, completion = (_count(usage.get(f"{kind}_tokens")) for kind in ("prompt", "completion"))
    usage.update(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion)
    for name, counted in (
        ("prompt_tokens_details", "cached_tokens"),
        ("completion_tokens_details", "reasoning_tokens"),
    ):
        details = usage.get(name)
        details = details if isinstance(details, dict) else {}
        usage[name] = {**details, counted: _count(details.get(counted))}
    return msgspec.json.encode(usage) != before


def _count(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0


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
        chunk, data = decode_broken(data, "event"), b""
    choices = chunk.get("choices") if isinstance(chunk, dict) else 0
    if not isinstance(choices, list | None) or not all(isinstance(choice, dict) for choice in choices or []):
        raise backend_lost("The engine sent an event that is no chunk.")
    return chunk, data


def decode_broken(data: bytes, what: str) -> Any:
    """Parse what a strict parser refuses: cut UTF-8 becomes U+FFFD, lone surrogates `?`; GatewayError."""
    try:
        text = json.dumps(json.loads(data.decode("utf-8", "replace"), strict=False), ensure_ascii=False)
        return msgspec.json.decode(text.encode("utf-8", "replace"))
    except (ValueError, RecursionError, msgspec.DecodeError) as exc:
        raise backend_lost(f"The engine sent an {what} that is no JSON.") from exc
