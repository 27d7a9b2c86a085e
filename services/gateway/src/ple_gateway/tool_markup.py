"""Tool calls that an engine's parser left in the text, in both syntaxes that Qwen models write.

`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, and
`<function=NAME><parameter=KEY>VALUE</parameter> </function>` with or without `<tool_call>` around it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

_MARKERS = ("<tool_call>", "<function=")
_MARKER = re.compile("|".join(map(re.escape, _MARKERS)))
_CLOSERS = ("</tool_call>", "</function>")
_LONGEST = max(map(len, _MARKERS + _CLOSERS))
_JSON_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>\s*", re.DOTALL)
_XML_CALL = re.compile(
    r"(?:<tool_call>\s*)?<function=([^>\n]{1,128})>(.*?)</function>\s*"
    r"(?:</tool_call>\s*|(?=<tool_call>|<function=|\Z))",
    re.DOTALL,
)
_PARAMETER = re.compile(r"<parameter=([^>\n]{1,256})>\n?(.*?)\n?</parameter>\s*(?=<parameter=|\Z)", re.DOTALL)
_MAX_NAME_CHARS = 128
_HEAD_CHARS = 256  # a marker, blanks and a name
_MAX_FRUITLESS = 64  # each look reads all that is held, so that their number needs a bound

Tools = Mapping[str, Any]  # a function's name -> its JSON schema


@dataclass(frozen=True)
class WrittenCall:
    """A call that stood in the text; `arguments` is JSON text."""

    name: str
    arguments: str


class MarkupWatch:
    """Holds text back from where it looks like a call, until the end or until it is none.

    Only a call of one of the request's tools counts, and only when nothing but calls follows it: an
    answer that explains the syntax stays an answer.
    """

    def __init__(self, tools: Tools, *, hold: bool) -> None:
        self._tools = tools
        self._hold = hold
        self._held = ""
        self._looked_at = 0  # before this the held text has no closer
        self._followed = False  # a closer was seen: what follows decides
        self._fruitless = 0  # how often no call was found since then
        self.seen = False

    def feed(self, text: str) -> str:
        """Return what can go on now."""
        if not self._held and "<" not in text:
            return text
        self._held += text
        released = ""
        while self._held:
            marker = _MARKER.search(self._held)
            if marker is None:
                return released + self._release(len(self._held) - _begun_marker(self._held))
            self.seen = True
            released += self._release(marker.start())
            if self._hold and self._may_be_call():
                return released
            released += self._release(len(marker[0]))
        return released

    def finish(self) -> tuple[str, list[WrittenCall]]:
        """Return the text that was held back, and the calls that it is, if it is nothing else."""
        held, self._held = self._held, ""
        calls, end = _calls_at_start(held, self._tools)
        return held, calls if end == len(held) else []

    def _release(self, length: int) -> str:
        if not length:
            return ""
        text, self._held = self._held[:length], self._held[length:]
        self._looked_at = 0
        self._followed = False
        self._fruitless = 0
        return text

    def _may_be_call(self) -> bool:
        """Whether the held text, which begins with a marker, can still become calls and nothing else."""
        if not _head_fits(self._held[:_HEAD_CHARS], self._tools):
            return False
        start, self._looked_at = self._looked_at, max(0, len(self._held) - _LONGEST)
        if self._followed or any(closer in self._held[start:] for closer in _CLOSERS):
            self._followed = True
            return self._ends_in_calls()
        return True

    def _ends_in_calls(self) -> bool:
        calls, end = _calls_at_start(self._held, self._tools)
        if not calls:
            self._fruitless += 1
            if self._fruitless > _MAX_FRUITLESS:
                return False
            end = max(self._held.rfind(closer) + len(closer) for closer in _CLOSERS)
            if self._held[:end].endswith("</tool_call>"):
                return False
        rest = self._held[end:].lstrip()
        return not rest or any(rest.startswith(tag) or tag.startswith(rest) for tag in _MARKERS + _CLOSERS)


def _head_fits(held: str, tools: Tools) -> bool:
    rest = held.removeprefix("<tool_call>").lstrip()
    if not rest.startswith("<function="):
        return rest.startswith("{") or "<function=".startswith(rest)
    name, closed, _ = rest.removeprefix("<function=").partition(">")
    return name.strip() in tools if closed else len(name) <= _MAX_NAME_CHARS


def _begun_marker(text: str) -> int:
    """How many characters at the end may begin a marker."""
    for length in range(min(_LONGEST, len(text)), 0, -1):
        if any(marker.startswith(text[-length:]) for marker in _MARKERS):
            return length
    return 0


def _calls_at_start(text: str, tools: Tools) -> tuple[list[WrittenCall], int]:
    """Parse the calls that `text` begins with; where they end."""
    calls: list[WrittenCall] = []
    position = 0
    while True:
        for pattern, parse in ((_JSON_CALL, _json_call), (_XML_CALL, _xml_call)):
            match = pattern.match(text, position)
            call = parse(match, tools) if match else None
            if match and call:
                calls.append(call)
                position = match.end()
                break
        else:
            return calls, position


def _json_call(match: re.Match[str], tools: Tools) -> WrittenCall | None:
    try:
        call = msgspec.json.decode(match[1])
    except (msgspec.DecodeError, RecursionError):
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    if call.get("name") not in tools or not isinstance(arguments, dict):
        return None
    return WrittenCall(call["name"], msgspec.json.encode(arguments).decode())


def _xml_call(match: re.Match[str], tools: Tools) -> WrittenCall | None:
    name = match[1].strip()
    if name not in tools:
        return None
    schema = tools[name]
    properties = schema.get("properties") if isinstance(schema, dict) else None
    arguments = {}
    body = match[2].strip()
    position = 0
    while position < len(body):
        parameter = _PARAMETER.match(body, position)
        if not parameter:
            return None
        kind = properties.get(parameter[1]) if isinstance(properties, dict) else None
        arguments[parameter[1]] = _value(parameter[2], kind)
        position = parameter.end()
    return WrittenCall(name, msgspec.json.encode(arguments).decode())


def _value(text: str, schema: Any) -> Any:
    """Strings stand raw, all else as JSON; what is no JSON is a string."""
    if isinstance(schema, dict) and schema.get("type") == "string":
        return text
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text
