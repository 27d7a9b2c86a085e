"""A streamed answer as numbered events, from response.created to response.completed."""

from typing import Any

import msgspec

from ple_gateway import sse
from ple_gateway.chunks import Chunk
from ple_gateway.errors import GatewayError
from ple_gateway.openai_responses.response import (
    Item,
    ResponseHead,
    call_item,
    message_item,
    reasoning_item,
    status_of,
    text_part,
)


class ResponsesEvents:
    """The state of one stream. Items are numbered as they begin; calls may overlap, texts may not."""

    keepalive = sse.COMMENT

    def __init__(self, head: ResponseHead) -> None:
        self._head = head
        self._sequence = 0
        self._started = False
        self._output: list[Item] = []
        self._text_at: int | None = None  # place of the text that goes on
        self._texts: list[str] = []
        self._calls: dict[int, int] = {}  # the engine's index -> place of the item
        self._arguments: dict[int, list[str]] = {}  # place -> pieces
        self._reason = "stop"
        self._usage: dict[str, Any] | None = None

    def chunk(self, chunk: Chunk) -> bytes:
        """Say one chunk; b"" when it holds nothing for this client."""
        self._usage = chunk.fields.get("usage") or self._usage
        events = [self._start()]
        for choice in chunk.fields["choices"]:
            delta = choice.get("delta") or {}
            for kind, name in (("reasoning", "reasoning"), ("message", "content")):
                if delta.get(name):
                    events.append(self._say(kind, delta[name]))
            events += [self._take_call(call) for call in delta.get("tool_calls", ())]
            self._reason = choice.get("finish_reason") or self._reason
        return b"".join(events)

    def end(self) -> bytes:
        """Close what is open, and the response."""
        status = status_of(self._reason)
        events = [self._end_text(status if not self._calls else "completed")]
        last = max(self._arguments, default=-1)
        events += [
            self._end_call(place, status if place == last else "completed") for place in self._arguments
        ]
        response = self._head.finished(self._reason, self._output, self._usage)
        events.append(self._event(f"response.{response['status']}", response=response))
        return b"".join(events)

    def failure(self, error: GatewayError) -> bytes:
        """response.failed, with what was said so far."""
        told = {"code": error.code or error.type, "message": error.message}
        begun = self._start()
        return begun + self._event(
            "response.failed", response=self._head.response("failed", self._output, error=told)
        )

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = msgspec.json.encode({"type": kind, "sequence_number": self._sequence, **fields})
        self._sequence += 1
        return sse.named(kind, data)

    def _start(self) -> bytes:
        if self._started:
            return b""
        self._started = True
        response = self._head.response("in_progress", [])
        return b"".join(
            self._event(f"response.{name}", response=response) for name in ("created", "in_progress")
        )

    def _add(self, item: Item) -> bytes:
        self._output.append(item)
        return self._event("response.output_item.added", output_index=len(self._output) - 1, item=item)

    def _done(self, place: int, status: str) -> bytes:
        item = self._output[place]
        item["status"] = status
        return self._event("response.output_item.done", output_index=place, item=item)

    def _say(self, kind: str, text: str) -> bytes:
        opening = b""
        if self._text_at is None or self._output[self._text_at]["type"] != kind:
            opening = self._end_text("completed") + self._begin_text(kind)
        self._texts.append(text)
        return opening + self._text_event(_TEXT_EVENTS[kind] + ".delta", delta=text, **_logprobs(kind))

    def _begin_text(self, kind: str) -> bytes:
        make = reasoning_item if kind == "reasoning" else message_item
        added = self._add(make("", "in_progress"))
        self._text_at = len(self._output) - 1
        return added + self._text_event("response.content_part.added", part=_part(kind, ""))

    def _text_event(self, name: str, **fields: Any) -> bytes:
        assert self._text_at is not None
        item_id = self._output[self._text_at]["id"]
        place = {"item_id": item_id, "output_index": self._text_at, "content_index": 0}
        return self._event(name, **place, **fields)

    def _end_text(self, status: str) -> bytes:
        if self._text_at is None:
            return b""
        text, place = "".join(self._texts), self._text_at
        kind = self._output[place]["type"]
        self._output[place]["content"] = [_part(kind, text)]
        done = self._text_event(_TEXT_EVENTS[kind] + ".done", text=text, **_logprobs(kind))
        done += self._text_event("response.content_part.done", part=_part(kind, text))
        self._text_at, self._texts = None, []
        return done + self._done(place, status)

    def _take_call(self, delta: dict[str, Any]) -> bytes:
        opening = b""
        function = delta["function"]
        if delta["index"] not in self._calls:
            opening = self._end_text("completed")
            opening += self._add(call_item(delta["id"], function["name"], "", "in_progress"))
            self._calls[delta["index"]] = len(self._output) - 1
            self._arguments[len(self._output) - 1] = []
        place = self._calls[delta["index"]]
        arguments = function.get("arguments", "")
        if not arguments:
            return opening
        self._arguments[place].append(arguments)
        return opening + self._call_event(place, "delta", delta=arguments)

    def _call_event(self, place: int, step: str, **fields: Any) -> bytes:
        item_id = self._output[place]["id"]
        kind = f"response.function_call_arguments.{step}"
        return self._event(kind, item_id=item_id, output_index=place, **fields)

    def _end_call(self, place: int, status: str) -> bytes:
        item = self._output[place]
        item["arguments"] = "".join(self._arguments[place])
        done = self._call_event(place, "done", name=item["name"], arguments=item["arguments"])
        return done + self._done(place, status)


_TEXT_EVENTS = {"reasoning": "response.reasoning_text", "message": "response.output_text"}


def _part(kind: str, text: str) -> dict[str, Any]:
    return text_part(text) if kind == "message" else {"type": "reasoning_text", "text": text}


def _logprobs(kind: str) -> dict[str, Any]:
    return {"logprobs": []} if kind == "message" else {}
