"""The answer in one piece: mended and checked as a streamed one is."""

from typing import Any

import msgspec

from ple_gateway.choice import ChoiceRelay, Expected
from ple_gateway.chunks import complete_usage, decode_broken, head_of
from ple_gateway.engine_errors import from_engine_frame
from ple_gateway.errors import backend_lost
from ple_gateway.tool_calls import Note


async def checked_answer(body: bytes, expected: Expected, model: str | None, note: Note) -> dict[str, Any]:
    """Parse an engine's answer and check every choice that ended by itself.

    Raises GatewayError: `empty_answer` and `schema_violation` are worth a second try, the rest are not.
    """
    answer = _decode(body)
    answer.update(head_of(answer, model))
    for index, choice in enumerate(answer["choices"]):
        choice.setdefault("index", index)
        relay = ChoiceRelay(expected, note)
        message = choice.get("message")
        if isinstance(message, dict):
            await _check_message(choice, message, relay)
        elif isinstance(choice.get("text"), str):
            choice.pop("message", None)
            await relay.take(choice)
        else:
            raise backend_lost("The engine's answer has no message.")
        if not relay.finished:
            raise backend_lost("The engine's answer has no finish reason.")
    if isinstance(answer.get("usage"), dict):
        complete_usage(answer["usage"])
    else:
        answer.pop("usage", None)
    return answer


async def _check_message(choice: dict[str, Any], message: dict[str, Any], relay: ChoiceRelay) -> None:
    """Let a whole message pass as the only delta of a stream."""
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        for index, call in enumerate(calls):
            if isinstance(call, dict):
                call["index"] = index
    piece = {"delta": message, "finish_reason": choice.get("finish_reason")}
    await relay.take(piece)
    choice["finish_reason"] = piece["finish_reason"]
    calls = relay.calls.whole()
    message.pop("tool_calls", None)
    if calls:
        message["tool_calls"] = calls
    message["content"] = message.get("content") or (None if calls else "")
    message.setdefault("refusal", None)


def _decode(body: bytes) -> dict[str, Any]:
    try:
        answer = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        answer = decode_broken(body, "answer")
    if isinstance(answer, dict) and answer.get("error"):
        raise from_engine_frame(answer["error"])
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if (
        not isinstance(choices, list)
        or not choices
        or not all(isinstance(choice, dict) for choice in choices)
    ):
        raise backend_lost("The engine's answer has no choices.")
    return answer  # type: ignore[no-any-return]
