"""A chat's answer as a message."""

import uuid
from typing import Any

import msgspec

# Clients send thoughts back only with a signature. Nobody checks it here.
SIGNATURE = "triplex"
_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}


def new_id() -> str:
    """Return the id of a message."""
    return f"msg_{uuid.uuid4().hex[:24]}"


def stop_of(choice: dict[str, Any]) -> tuple[str, str | None]:
    """Return `stop_reason` and `stop_sequence` of a finished choice."""
    sequence = choice.get("stop_reason")  # vLLM: the stop string that matched, or a token id
    if choice["finish_reason"] == "stop" and isinstance(sequence, str):
        return "stop_sequence", sequence
    return _STOP_REASONS.get(choice["finish_reason"], "end_turn"), None


def usage_of(usage: dict[str, Any] | None) -> dict[str, int]:
    """Return usage with what came from the prefix cache apart."""
    usage = usage or {}
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return {
        "input_tokens": max(0, (usage.get("prompt_tokens") or 0) - cached),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.get("completion_tokens") or 0,
    }


def message_of(answer: dict[str, Any], *, thinking: bool) -> dict[str, Any]:
    """Return the message that an answer is."""
    choice = answer["choices"][0]
    reason, sequence = stop_of(choice)
    return {
        "id": new_id(),
        "type": "message",
        "role": "assistant",
        "model": answer["model"],
        "content": _blocks(choice.get("message") or {}, thinking=thinking),
        "stop_reason": reason,
        "stop_sequence": sequence,
        "usage": usage_of(answer.get("usage")),
    }


def _blocks(message: dict[str, Any], *, thinking: bool) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if thinking and message.get("reasoning"):
        blocks.append({"type": "thinking", "thinking": message["reasoning"], "signature": SIGNATURE})
    if message.get("content"):
        blocks.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls", []):
        try:
            arguments = msgspec.json.decode(call["function"]["arguments"])
        except (msgspec.DecodeError, RecursionError):
            continue  # cut by the token limit, which stop_reason tells: half a call must not be run
        blocks.append(
            {
                "type": "tool_use",
                "id": call["id"],
                "name": call["function"]["name"],
                "input": arguments if isinstance(arguments, dict) else {},
            }
        )
    return blocks
