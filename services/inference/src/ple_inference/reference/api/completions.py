"""POST /v1/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from ple_inference.metrics import Metrics
from ple_inference.reference.api.errors import bad_request
from ple_inference.reference.api.event_stream import event_stream
from ple_inference.reference.api.formats import format_grammar
from ple_inference.reference.api.generation import Generation, Job, choices_of, room_for
from ple_inference.reference.api.logprobs import completion_logprobs
from ple_inference.reference.api.parameters import CompletionBody, sampling_params
from ple_inference.reference.api.prompts import text_prompt
from ple_inference.reference.sampling import TokenLogprobs
from ple_inference.reference.sequence import Delta, Finished
from ple_inference.reference.service import Service


async def complete_text(
    service: Service, metrics: Metrics, body: CompletionBody, request: Request
) -> Response:
    """Continue one or several prompts. Raises ApiError before anything is sent."""
    prompts = _prompts_of(body)
    if len(prompts) * body.n > service.settings.max_num_seqs + service.settings.max_queued:
        raise bad_request(f"{len(prompts) * body.n} choices are more than ever fit", "prompt")
    new_grammar = await format_grammar(service.grammars, body.response_format)
    jobs: list[Job] = []
    for given in prompts:
        prompt = text_prompt(service, given)
        params = sampling_params(
            body,
            service.generation_defaults,
            vocab_size=service.vocab_size,
            room=room_for(prompt, service, "prompt"),
            default_max_tokens=service.settings.default_max_tokens,
        )
        jobs += choices_of(Job(prompt, params, new_grammar), body.n)
    generation = Generation(service, metrics, jobs)
    generation.submit()
    reply = _Reply(service, generation, body)
    if body.stream:
        return event_stream(reply.chunks(request))
    return JSONResponse(await reply.whole(request))


def _prompts_of(body: CompletionBody) -> list[str | list[int]]:
    match body.prompt:
        case str() as text:
            return [text]
        case []:
            raise bad_request("no prompt", "prompt")
        case [int(), *_]:
            return [body.prompt]  # type: ignore[list-item]  # one prompt of token ids
        case [*several]:
            return several  # type: ignore[return-value]  # texts, or lists of ids


@dataclass
class _Choice:
    """One choice's text, as it grows."""

    text: str = ""
    sent: int = 0
    entries: list[TokenLogprobs] = field(default_factory=list)
    offset: int = 0
    finish_reason: str | None = None

    def take(self, event: Delta | Finished) -> None:
        self.text += event.text
        if isinstance(event, Finished):
            self.finish_reason = event.reason
        elif event.logprobs is not None:
            self.entries.append(event.logprobs)


class _Reply:
    """The answer of one request in either form."""

    def __init__(self, service: Service, generation: Generation, body: CompletionBody) -> None:
        self._service, self._generation, self._body = service, generation, body
        self._choices = [_Choice(text=self._echo(job)) for job in generation.jobs]
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.settings.model_name,
        }

    def _echo(self, job: Job) -> str:
        if not self._body.echo:
            return ""
        vocabulary = self._service.vocabulary
        return b"".join(map(vocabulary.literal_bytes_of, job.prompt.tokens)).decode(errors="replace")

    async def whole(self, request: Request) -> dict[str, Any]:
        async with aclosing(self._generation.events(request)) as events:
            async for index, event in events:
                self._choices[index].take(event)
        choices = [self._part(index, choice) for index, choice in enumerate(self._choices)]
        return {**self._head, "choices": choices, "usage": self._generation.usage.as_json()}

    async def chunks(self, request: Request) -> AsyncGenerator[dict[str, Any]]:
        async with aclosing(self._generation.events(request)) as events:
            async for index, event in events:
                choice = self._choices[index]
                choice.take(event)
                if len(choice.text) > choice.sent or choice.entries or choice.finish_reason:
                    yield self._frame([self._part(index, choice)], None)
        if self._body.include_usage:
            yield self._frame([], self._generation.usage.as_json())

    def _part(self, index: int, choice: _Choice) -> dict[str, Any]:
        """What came since the last part: everything, when there is only one."""
        text = choice.text[choice.sent :]
        logprobs = None
        if self._body.logprobs is not None:
            logprobs = completion_logprobs(choice.entries, self._service.vocabulary, choice.sent)
        choice.sent, choice.entries = len(choice.text), []
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": choice.finish_reason}

    def _frame(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> dict[str, Any]:
        frame = {**self._head, "choices": choices}
        return frame | {"usage": usage} if self._body.include_usage else frame
