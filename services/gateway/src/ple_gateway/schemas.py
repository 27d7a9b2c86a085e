"""Structured output: schemas are checked before the engine sees them, answers before the client does."""

from typing import Any


class AnswerSchema:
    """What a finished answer has to be."""

    async def check_answer(self, text: str) -> None:
        """Raise GatewayError 502 `schema_violation` unless `text` is what was asked for."""


async def answer_schema(request: dict[str, Any]) -> AnswerSchema | None:
    """Return the check for a request's `response_format`."""
    return None
