"""How a client speaks: what its request is to the engine, and how answers, events and errors look to it."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from ple_gateway import sse
from ple_gateway.chunks import Chunk
from ple_gateway.errors import GatewayError
from ple_gateway.messages import Origin


class AnswerEvents(Protocol):
    """One streamed answer. Everything returned is whole events, ready to be sent."""

    @property
    def keepalive(self) -> bytes:
        """What is sent while there is nothing to say."""

    def chunk(self, chunk: Chunk) -> bytes:
        """Say one chunk of the engine's."""

    def end(self) -> bytes:
        """Say that the answer is complete."""

    def failure(self, error: GatewayError) -> bytes:
        """Say that the answer has failed, and end."""


class Dialect(Protocol):
    """One request, and how its answer will be said."""

    @property
    def path(self) -> str:
        """The engine's path."""

    @property
    def request(self) -> dict[str, Any]:
        """The request to the engine, not checked yet."""

    @property
    def origins(self) -> Sequence[Origin] | None:
        """What the client calls the request's messages."""

    def answer(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Say an answer in one piece."""

    def events(self) -> AnswerEvents:
        """Return what says a streamed answer."""


Speak = Callable[[str, dict[str, Any]], Dialect]  # of a path and a parsed body; raises GatewayError 400


class CompletionEvents:
    """OpenAI's chat and text completions: the engine's own chunks."""

    keepalive = sse.COMMENT

    def chunk(self, chunk: Chunk) -> bytes:
        """Pass it on."""
        return sse.frame(chunk.encoded())

    def end(self) -> bytes:
        """[DONE]."""
        return sse.frame(sse.DONE)

    def failure(self, error: GatewayError) -> bytes:
        """An event with `error`, then [DONE]."""
        return sse.frame(msgspec.json.encode(error.body())) + sse.frame(sse.DONE)


class CompletionDialect:
    """OpenAI's chat and text completions: the engine speaks it too."""

    origins = None

    def __init__(self, path: str, request: dict[str, Any]) -> None:
        self.path = path
        self.request = request

    def answer(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Pass it on."""
        return answer

    def events(self) -> CompletionEvents:
        """Pass them on."""
        return CompletionEvents()
