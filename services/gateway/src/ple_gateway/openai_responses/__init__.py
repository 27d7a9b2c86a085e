"""OpenAI's Responses API without state, said as a chat: every request brings its whole history."""

from collections.abc import Sequence
from typing import Any

from ple_gateway.messages import Origin
from ple_gateway.openai_responses.answer import response_of
from ple_gateway.openai_responses.events import ResponsesEvents
from ple_gateway.openai_responses.request import chat_request
from ple_gateway.openai_responses.response import ResponseHead


class ResponsesDialect:
    """`POST /v1/responses`."""

    path = "/v1/chat/completions"

    def __init__(self, _path: str, body: dict[str, Any]) -> None:
        self._body = body
        self.request: dict[str, Any]
        self.origins: Sequence[Origin]
        self.request, self.origins = chat_request(body)

    def answer(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Return a response."""
        return response_of(answer, self._head())

    def events(self) -> ResponsesEvents:
        """Return events from response.created to response.completed."""
        return ResponsesEvents(self._head())

    def _head(self) -> ResponseHead:
        return ResponseHead({**self._body, "model": self.request.get("model")})
