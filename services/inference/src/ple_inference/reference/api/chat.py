"""POST /v1/chat/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from ple_inference.metrics import Metrics
from ple_inference.reference.answer import AnswerParser, Content, Piece, Thought, ToolCall
from ple_inference.reference.api.event_stream import event_stream
from ple_inference.reference.api.formats import demanded_tools, format_grammar, tool_grammar
from ple_inference.reference.api.generation import Generation, Job, choices_of, room_for
from ple_inference.reference.api.logprobs import chat_logprobs
from ple_inference.reference.api.parameters import ChatBody, sampling_params
from ple_inference.reference.api.prompts import chat_prompt
from ple_inference.reference.sequence import Delta, Finished
from ple_inference.reference.service import Service


async def complete_chat(service: Service, metrics: Metrics, body: ChatBody, request: Request) -> Response:
    """Answer a chat, whole or streamed. Raises ApiError before anything is sent."""
    demanded_tools(body)
    tools = body.tools if body.tool_choice != "none" else []
    prompt, rendered = await chat_prompt(service, body.messages, tools, _template_options(body))
    room = room_for(prompt, service, "messages")
    params = sampling_params(
        body,
        service.generation_defaults,
        vocab_size=service.vocab_size,
        room=room,
        default_max_tokens=service.settings.default_max_tokens,
    )
    new_grammar = await tool_grammar(service.grammars, body)
    if new_grammar is None:
        new_grammar = await format_grammar(service.grammars, body.response_format)
    job = Job(prompt, params, new_grammar, rendered.thinking)
    generation = Generation(service, metrics, choices_of(job, body.n))
    answers = [_Choice(service, body, tools, index, rendered.thinking) for index in range(body.n)]
    generation.submit()
    reply = _Reply(service.settings.model_name, generation, answers, body)
    if body.stream:
        return event_stream(reply.chunks(request))
    return JSONResponse(await reply.whole(request))


def _template_options(body: ChatBody) -> dict[str, Any]:
    options = dict(body.chat_template_kwargs)
    if body.reasoning_effort is not None:
        options.setdefault("reasoning_effort", body.reasoning_effort)
    return options


@dataclass
class _Choice:
    """One choice's message, as it grows."""

    service: Service
    body: ChatBody
    tools: list[dict[str, Any]]
    index: int
    thinking: bool
    thoughts: list[str] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None

    def __post_init__(self) -> None:
        self._parser = AnswerParser(thinking=self.thinking, tools=self.tools)

    def take(self, event: Delta | Finished) -> Iterable[dict[str, Any]]:
        """OpenAI deltas that an event makes."""
        if isinstance(event, Delta):
            if event.logprobs is not None:
                self.logprobs.append(chat_logprobs(event.logprobs, self.service.vocabulary))
            return [self._delta(piece) for piece in self._parser.push(event.text)]
        pieces = [*self._parser.push(event.text), *self._parser.finish()]
        deltas = [self._delta(piece) for piece in pieces]
        # A named choice is what the caller asked for, not what the model chose: OpenAI ends it in "stop".
        chosen = self.calls and event.reason == "stop" and not isinstance(self.body.tool_choice, dict)
        self.finish_reason = "tool_calls" if chosen else event.reason
        return deltas

    def _delta(self, piece: Piece) -> dict[str, Any]:
        match piece:
            case Thought(text):
                self.thoughts.append(text)
                return {"reasoning": text, "reasoning_content": text}
            case Content(text):
                self.content.append(text)
                return {"content": text}
            case ToolCall(call_id, name, arguments):
                function = {"name": name, "arguments": arguments}
                call = {"id": call_id, "type": "function", "function": function}
                self.calls.append(call)
                return {"tool_calls": [{"index": len(self.calls) - 1, **call}]}

    def message(self) -> dict[str, Any]:
        content, thoughts = "".join(self.content), "".join(self.thoughts)
        message: dict[str, Any] = {"role": "assistant", "refusal": None}
        message["content"] = None if self.calls and not content else content
        if self.thinking:
            message |= {"reasoning": thoughts, "reasoning_content": thoughts}
        if self.calls:
            message["tool_calls"] = self.calls
        return message

    def take_logprobs(self) -> dict[str, Any] | None:
        """Logprobs since the last call, or None where none were asked for."""
        if not self.body.logprobs:
            return None
        content, self.logprobs = self.logprobs, []
        return {"content": content, "refusal": None}


class _Reply:
    """The answer of one request in either form."""

    def __init__(self, model: str, generation: Generation, choices: list[_Choice], body: ChatBody) -> None:
        self._generation, self._choices, self._body = generation, choices, body
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    async def whole(self, request: Request) -> dict[str, Any]:
        async with aclosing(self._generation.events(request)) as events:
            async for index, event in events:
                self._choices[index].take(event)
        choices = [
            {
                "index": choice.index,
                "message": choice.message(),
                "logprobs": choice.take_logprobs(),
                "finish_reason": choice.finish_reason,
            }
            for choice in self._choices
        ]
        usage = self._generation.usage.as_json()
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": usage}

    async def chunks(self, request: Request) -> AsyncGenerator[dict[str, Any]]:
        for choice in self._choices:
            yield self._chunk(choice, {"role": "assistant", "content": ""})
        async with aclosing(self._generation.events(request)) as events:
            async for index, event in events:
                choice = self._choices[index]
                for delta in choice.take(event):
                    yield self._chunk(choice, delta)
                if choice.finish_reason is not None:
                    yield self._chunk(choice, {})
        if self._body.include_usage:
            yield self._frame([], self._generation.usage.as_json())

    def _chunk(self, choice: _Choice, delta: dict[str, Any]) -> dict[str, Any]:
        body = {
            "index": choice.index,
            "delta": delta,
            "logprobs": choice.take_logprobs(),
            "finish_reason": None if delta else choice.finish_reason,
        }
        return self._frame([body], None)

    def _frame(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> dict[str, Any]:
        frame = {**self._head, "object": "chat.completion.chunk", "choices": choices}
        return frame | {"usage": usage} if self._body.include_usage else frame
