"""A streamed answer as events: message_start, blocks one after another, message_delta, message_stop."""

from dataclasses import dataclass, field
from typing import Any

import msgspec

from ple_gateway import sse
from ple_gateway.anthropic_messages.answer import SIGNATURE, new_id, stop_of, usage_of
from ple_gateway.chunks import Chunk
from ple_gateway.errors import GatewayError


def _event(kind: str, **fields: Any) -> bytes:
    return sse.named(kind, msgspec.json.encode({"type": kind, **fields}))


@dataclass
class _Call:
    id: str
    name: str
    arguments: list[str] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        try:
            msgspec.json.decode("".join(self.arguments))
        except (msgspec.DecodeError, RecursionError):
            return False
        return True


class MessagesEvents:
    """The state of one stream. Blocks cannot overlap: calls that come interleaved wait for each other."""

    keepalive = _event("ping")

    def __init__(self, *, thinking: bool) -> None:
        self._thinking = thinking
        self._started = False
        self._open: str | None = None  # the open block's type
        self._blocks = 0
        self._calls: dict[int, _Call] = {}
        self._open_call: _Call | None = None
        self._waiting: list[_Call] = []
        self._texts: list[tuple[str, str]] = []  # that came in the middle of a call: kind and text
        self._stop: tuple[str, str | None] = ("end_turn", None)
        self._usage: dict[str, Any] | None = None

    def chunk(self, chunk: Chunk) -> bytes:
        """Say one chunk; b"" when it holds nothing for this client."""
        fields = chunk.fields
        self._usage = fields.get("usage") or self._usage
        events = [] if self._started else [self._start(fields)]
        for choice in fields["choices"]:
            delta = choice.get("delta") or {}
            if self._thinking and delta.get("reasoning"):
                events.append(self._take_text("thinking", delta["reasoning"]))
            if delta.get("content"):
                events.append(self._take_text("text", delta["content"]))
            events += [self._take_call(call) for call in delta.get("tool_calls", ())]
            if choice.get("finish_reason"):
                self._stop = stop_of(choice)
        return b"".join(events)

    def end(self) -> bytes:
        """Close what is open, and the message."""
        events = [self._write_call(call) for call in self._waiting]
        events += [self._say(kind, text) for kind, text in self._texts]
        events.append(self._close())
        reason, sequence = self._stop
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        events.append(_event("message_delta", delta=delta, usage=usage_of(self._usage)))
        events.append(_event("message_stop"))
        return b"".join(events)

    def failure(self, error: GatewayError) -> bytes:
        """An `error` event, and nothing after it."""
        return sse.named("error", msgspec.json.encode(error.anthropic_body()))

    def _start(self, fields: dict[str, Any]) -> bytes:
        self._started = True
        message: dict[str, Any] = {
            "id": new_id(),
            "type": "message",
            "role": "assistant",
            "model": fields.get("model"),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {**usage_of(self._usage), "output_tokens": 0},
        }
        return _event("message_start", message=message)

    def _take_text(self, kind: str, text: str) -> bytes:
        if self._open_call and not self._open_call.whole:
            self._texts.append((kind, text))
            return b""
        return self._say(kind, text)

    def _say(self, kind: str, text: str) -> bytes:
        """Say a piece of text; a block's field has the name of its type."""
        opening = b""
        if self._open != kind:
            block = {"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {})
            opening = self._begin(kind, block)
        return opening + self._delta({"type": f"{kind}_delta", kind: text})

    def _begin(self, kind: str, block: dict[str, Any]) -> bytes:
        closing = self._close()
        self._open = kind
        self._blocks += 1
        return closing + _event("content_block_start", index=self._blocks - 1, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._blocks - 1, delta=delta)

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        signed = b""
        if self._open == "thinking":
            signed = self._delta({"type": "signature_delta", "signature": SIGNATURE})
        self._open = self._open_call = None
        return signed + _event("content_block_stop", index=self._blocks - 1)

    def _take_call(self, delta: dict[str, Any]) -> bytes:
        function = delta["function"]
        arguments = function.get("arguments", "")
        call = self._calls.get(delta["index"])
        if call is not None:
            call.arguments.append(arguments)
            return self._more(arguments) if call is self._open_call else b""
        call = self._calls[delta["index"]] = _Call(delta["id"], function["name"], [arguments])
        if self._open_call and not self._open_call.whole:
            self._waiting.append(call)
            return b""
        return self._write_call(call)

    def _write_call(self, call: _Call) -> bytes:
        block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
        opening = self._begin("tool_use", block)
        self._open_call = call
        return opening + self._more("".join(call.arguments))

    def _more(self, arguments: str) -> bytes:
        return self._delta({"type": "input_json_delta", "partial_json": arguments}) if arguments else b""
