"""The response object and its items."""

import time
import uuid
from typing import Any

_ECHOED: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
    "truncation": "disabled",
    "user": None,
}
_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}

Item = dict[str, Any]


class ResponseHead:
    """What stays the same in one response: its id, and what it repeats of the request."""

    def __init__(self, body: dict[str, Any]) -> None:
        given = {name: body.get(name) for name in _ECHOED}
        reasoning = body.get("reasoning")
        self._fields = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": body.get("model"),
            "previous_response_id": None,
            "store": False,
            "background": False,
            "reasoning": {
                "effort": None,
                "summary": None,
                **(reasoning if isinstance(reasoning, dict) else {}),
            },
            **{name: _ECHOED[name] if value is None else value for name, value in given.items()},
        }

    def response(self, status: str, output: list[Item], **fields: Any) -> dict[str, Any]:
        """Return the response object as it is now."""
        rest = {"error": None, "incomplete_details": None, "usage": None, **fields}
        return {**self._fields, "status": status, "output": output, **rest}

    def finished(
        self, finish_reason: str, output: list[Item], usage: dict[str, Any] | None
    ) -> dict[str, Any]:
        """Return the response object of an answer that ended."""
        cause = _INCOMPLETE.get(finish_reason)
        return self.response(
            "incomplete" if cause else "completed",
            output,
            incomplete_details={"reason": cause} if cause else None,
            usage=_usage(usage),
        )


def status_of(finish_reason: str) -> str:
    """Return the status of the items that an answer ended with."""
    return "incomplete" if finish_reason in _INCOMPLETE else "completed"


def reasoning_item(text: str, status: str) -> Item:
    """Thoughts."""
    content = [{"type": "reasoning_text", "text": text}] if text else []
    return {"id": _new("rs"), "type": "reasoning", "summary": [], "content": content, "status": status}


def message_item(text: str, status: str) -> Item:
    """What the model says."""
    content = [text_part(text)] if text else []
    return {"id": _new("msg"), "type": "message", "role": "assistant", "content": content, "status": status}


def text_part(text: str) -> dict[str, Any]:
    """The only part of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def call_item(call_id: str, name: str, arguments: str, status: str) -> Item:
    """A call of a function."""
    return {
        "id": _new("fc"),
        "type": "function_call",
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
        "status": status,
    }


def _new(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def _usage(usage: dict[str, Any] | None) -> dict[str, Any] | None:
    if not usage:
        return None
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    reasoning = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": usage["total_tokens"],
    }
