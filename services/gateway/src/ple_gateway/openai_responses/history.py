"""The items of a Responses request as chat messages."""

from typing import Any

from ple_gateway.errors import GatewayError, invalid
from ple_gateway.messages import Message, Origin

_STATELESS = "Nothing is stored: send the item itself."


class History:
    """Messages as they are built, each with its origin; what one turn holds is one message."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.origins: list[Origin] = []
        self._turn: Message | None = None  # the model's turn that goes on

    def add_instructions(self, instructions: Any) -> None:
        """Put the instructions first; raises GatewayError 400."""
        if instructions is None:
            return
        if not isinstance(instructions, str):
            raise _wrong("instructions", "a string")
        self._append({"role": "system", "content": instructions}, Origin("instructions"))

    def add_input(self, given: Any) -> None:
        """Add a text or a list of items; raises GatewayError 400 naming the item."""
        if isinstance(given, str):
            self._append({"role": "user", "content": given}, Origin("input"))
        elif isinstance(given, list) and given:
            for index, item in enumerate(given):
                self._add(item, f"input[{index}]")
        else:
            raise _wrong("input", "a string or a list with at least one item")

    def _append(self, message: Message, origin: Origin) -> None:
        self._turn = message if message["role"] == "assistant" else None
        self.messages.append(message)
        self.origins.append(origin)

    def _add(self, item: Any, name: str) -> None:
        if not isinstance(item, dict):
            raise _wrong(name, "an object")
        kind = item.get("type") or "message"
        if kind == "message":
            self._add_message(item, name)
        elif kind == "reasoning":
            self._add_thoughts(_thoughts(item), name)
        elif kind == "function_call":
            self._add_call(item, name)
        elif kind == "function_call_output":
            output = item.get("output")
            result = {"role": "tool", "tool_call_id": item.get("call_id"), "content": output or ""}
            self._append(result, Origin(name, _numbered(f"{name}.output", output)))
        else:
            hint = (
                _STATELESS if kind == "item_reference" else "Use messages, function calls and their outputs."
            )
            raise invalid(f"Items of type {str(kind)[:100]!r} are not supported. {hint}", param=name)

    def _add_message(self, item: dict[str, Any], name: str) -> None:
        if item.get("role") != "assistant":
            message = {"role": item.get("role"), "content": item.get("content")}
            self._append(message, Origin(name))
        else:
            self._go_on(name, has_text=False)["content"] = item.get("content")

    def _add_thoughts(self, text: str, name: str) -> None:
        if text:
            turn = self._go_on(name, has_text=False)
            turn["reasoning"] = "\n".join(filter(None, (turn.get("reasoning"), text)))

    def _add_call(self, item: dict[str, Any], name: str) -> None:
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        self._go_on(name).setdefault("tool_calls", []).append(call)

    def _go_on(self, name: str, *, has_text: bool = True) -> Message:
        """Return the model's turn that goes on; a new one where that may have no text yet and has."""
        turn = self._turn
        if turn is None or (not has_text and ("content" in turn or "tool_calls" in turn)):
            turn = {"role": "assistant"}
            self._append(turn, Origin(name))
        return turn


def _thoughts(item: dict[str, Any]) -> str:
    """The text itself, or its summary where a client kept only that."""
    parts = item.get("content") or item.get("summary") or []
    texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    return "\n".join(text for text in texts if isinstance(text, str))


def _numbered(name: str, parts: Any) -> list[str]:
    return [f"{name}[{index}]" for index in range(len(parts))] if isinstance(parts, list) else []


def _wrong(name: str, what: str) -> GatewayError:
    return invalid(f"`{name}` must be {what}.", param=name)
