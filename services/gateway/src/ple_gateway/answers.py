"""The answer in one piece: check it, and ask once more when it is not what was asked for."""

from typing import Any

import msgspec

from ple_gateway.chunks import empty_answer, name_reasoning_twice
from ple_gateway.engine_errors import from_engine_frame
from ple_gateway.errors import backend_lost
from ple_gateway.schemas import AnswerSchema


async def checked_answer(body: bytes, schema: AnswerSchema | None, *, may_be_empty: bool) -> dict[str, Any]:
    """Parse an engine's answer and check every choice that ended by itself.

    Raises GatewayError: `empty_answer` and `schema_violation` are worth a second try, the rest are not.
    """
    answer = _decode(body)
    for choice in answer["choices"]:
        message = choice.get("message")
        if isinstance(message, dict):
            name_reasoning_twice(message)
        parts = message if isinstance(message, dict) else choice
        text = parts.get("content") or parts.get("text") or ""
        produced = text or parts.get("reasoning") or parts.get("tool_calls") or parts.get("refusal")
        if choice.get("finish_reason") != "stop":
            continue
        if not produced and not may_be_empty:
            raise empty_answer()
        if schema:
            await schema.check_answer(text)
    return answer


def _decode(body: bytes) -> dict[str, Any]:
    try:
        answer = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError) as exc:
        raise backend_lost("The engine's answer is no JSON.") from exc
    if isinstance(answer, dict) and answer.get("error"):
        raise from_engine_frame(answer["error"])
    if not isinstance(answer, dict) or not isinstance(answer.get("choices"), list):
        raise backend_lost("The engine's answer has no choices.")
    return answer
