"""Anthropic's Messages API, said as a chat: one path for checks, pictures, admission and validation."""

from collections.abc import Sequence
from typing import Any

from ple_gateway.anthropic_messages.answer import message_of
from ple_gateway.anthropic_messages.events import MessagesEvents
from ple_gateway.anthropic_messages.request import chat_request, wants_thinking
from ple_gateway.errors import backend_lost
from ple_gateway.messages import Origin

_COUNTED = ("model", "messages", "tools", "chat_template_kwargs")


class MessagesDialect:
    """`POST /v1/messages`."""

    path = "/v1/chat/completions"

    def __init__(self, _path: str, body: dict[str, Any]) -> None:
        self._thinking = wants_thinking(body)
        self.request: dict[str, Any]
        self.origins: Sequence[Origin]
        self.request, self.origins = chat_request(body)

    def answer(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Return a message."""
        return message_of(answer, thinking=self._thinking)

    def events(self) -> MessagesEvents:
        """Return events from message_start to message_stop."""
        return MessagesEvents(thinking=self._thinking)


class CountTokensDialect(MessagesDialect):
    """`POST /v1/messages/count_tokens`."""

    path = "/tokenize"

    def __init__(self, path: str, body: dict[str, Any]) -> None:
        super().__init__(path, body)
        self.request = {name: value for name, value in self.request.items() if name in _COUNTED}

    def answer(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Return the engine's own count."""
        count = answer.get("count")
        if not isinstance(count, int):
            raise backend_lost("The engine's answer has no count.")
        return {"input_tokens": count}
