"""Splits an answer's text into thoughts, content and tool calls while it comes."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ple_inference.reference.stop import unfinished_marker_length

_THINK_END = "</think>"
_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>\n?(.*?)\n?</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


@dataclass(frozen=True)
class Thought:
    text: str


@dataclass(frozen=True)
class Content:
    text: str


@dataclass(frozen=True)
class ToolCall:
    """`arguments` is JSON text."""

    id: str
    name: str
    arguments: str


Piece = Thought | Content | ToolCall


class AnswerParser:
    """Text in pieces in, pieces of an answer out.

    Args:
        thinking: the answer begins inside a think block.
        tools: OpenAI tool definitions; none: nothing is taken for a call.
    """

    def __init__(self, *, thinking: bool, tools: list[dict[str, Any]]) -> None:
        self._thinking = thinking
        self._schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
        self._in_call = False
        self._text = ""
        self._after_thoughts = False

    def push(self, text: str) -> Iterator[Piece]:
        """Pieces that can be told for sure; the rest waits for more text."""
        self._text += text
        while True:
            before = (self._text, self._thinking, self._in_call)
            piece = self._next()
            if piece is not None:
                yield piece
            if before == (self._text, self._thinking, self._in_call):
                return

    def finish(self) -> Iterator[Piece]:
        """What still waits, as what it looks like: a call that was cut is content."""
        rest, self._text = self._text, ""
        if self._in_call:
            yield Content(_CALL + rest)
        elif rest:
            yield Thought(rest) if self._thinking else Content(rest)

    def _next(self) -> Piece | None:
        if self._thinking:
            return self._next_thought()
        if self._in_call:
            return self._next_call()
        return self._next_content()

    def _next_thought(self) -> Piece | None:
        thought, marker, rest = self._text.partition(_THINK_END)
        if marker:
            self._thinking, self._after_thoughts, self._text = False, True, rest
            thought = thought.rstrip("\n")
        else:
            thought = self._release((_THINK_END,))
        return Thought(thought) if thought else None

    def _next_content(self) -> Piece | None:
        if self._after_thoughts:
            self._text = self._text.lstrip("\n")
            self._after_thoughts = not self._text
        if not self._schemas:
            content, self._text = self._text, ""
            return Content(content) if content else None
        content, marker, rest = self._text.partition(_CALL)
        if marker:
            self._in_call, self._text = True, rest
            content = content.rstrip("\n")
        else:
            content = self._release((_CALL,))
        return Content(content) if content else None

    def _release(self, markers: tuple[str, ...]) -> str:
        """Text before what may begin a marker, and before line ends that a marker would swallow."""
        sure = len(self._text) - unfinished_marker_length(self._text, markers)
        released = self._text[:sure].rstrip("\n")
        self._text = self._text[len(released) :]
        return released

    def _next_call(self) -> Piece | None:
        inside, marker, rest = self._text.partition(_CALL_END)
        if not marker:
            return None
        self._in_call, self._text = False, rest.lstrip("\n")
        call = self._parse_call(inside)
        return call if call is not None else Content(f"{_CALL}{inside}{_CALL_END}")

    def _parse_call(self, inside: str) -> ToolCall | None:
        match = _FUNCTION.fullmatch(inside)
        if match is None or match[1] not in self._schemas:
            return None
        properties = self._schemas[match[1]].get("properties") or {}
        arguments = {
            name: _typed(value, properties.get(name)) for name, value in _PARAMETER.findall(match[2])
        }
        name = f"call_{secrets.token_hex(12)}"
        return ToolCall(name, match[1], json.dumps(arguments, ensure_ascii=False))


def _typed(value: str, schema: Any) -> Any:
    """Strings stand raw, all else as JSON; without a schema JSON that parses is taken for JSON."""
    if isinstance(schema, dict) and schema.get("type") == "string":
        # A grammar may put a space where templates put a line end.
        choices = schema.get("enum")
        return value.strip() if isinstance(choices, list) and value.strip() in choices else value
    try:
        return json.loads(value, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
