"""A chat's answer as a response."""

from typing import Any

from ple_gateway.openai_responses.response import (
    Item,
    ResponseHead,
    call_item,
    message_item,
    reasoning_item,
    status_of,
)


def response_of(answer: dict[str, Any], head: ResponseHead) -> dict[str, Any]:
    """Return the response that an answer in one piece is."""
    choice = answer["choices"][0]
    reason = choice["finish_reason"]
    output = _items(choice.get("message") or {}, status_of(reason))
    return head.finished(reason, output, answer.get("usage"))


def _items(message: dict[str, Any], status: str) -> list[Item]:
    """Only what came last can be incomplete."""
    items: list[Item] = []
    if message.get("reasoning"):
        items.append(reasoning_item(message["reasoning"], "completed"))
    if message.get("content"):
        items.append(message_item(message["content"], "completed"))
    for call in message.get("tool_calls", []):
        function = call["function"]
        items.append(call_item(call["id"], function["name"], function["arguments"], "completed"))
    if items:
        items[-1]["status"] = status
    return items
