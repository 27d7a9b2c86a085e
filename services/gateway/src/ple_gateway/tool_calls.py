"""The tool calls of one choice, as clients may rely on them whatever the engine's deltas look like."""

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ple_gateway.tool_markup import WrittenCall

Note = Callable[[str], None]  # counts what had to be mended


@dataclass
class _Call:
    index: int = -1  # -1 until it has a name and was announced
    given_id: str = ""  # by the engine
    id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.arguments)


class ToolCallRelay:
    """Takes deltas of calls in whatever form, gives them in one.

    The first delta of an index has id, type and name, later ones arguments only; indices are dense from
    0, ids unique. A call without a name is never told.
    """

    def __init__(self, note: Note) -> None:
        self._note = note
        self._calls: list[_Call] = []
        self._by_index: dict[int, _Call] = {}
        self._told = 0

    @property
    def told(self) -> int:
        """How many calls the client knows of."""
        return self._told

    def take(self, deltas: Any) -> list[dict[str, Any]]:
        """Return the deltas to send on for those of one chunk."""
        sent = []
        for delta in deltas if isinstance(deltas, list) else []:
            if isinstance(delta, dict):
                sent += self._take(delta)
        return sent

    def _take(self, delta: dict[str, Any]) -> list[dict[str, Any]]:
        function = delta.get("function")
        function = function if isinstance(function, dict) else {}
        given_id, name = _text(delta.get("id")), _text(function.get("name"))
        index = delta.get("index")
        call = self._call_of(index if isinstance(index, int) else None, given_id, name)
        call.given_id = call.given_id or given_id
        call.name = call.name or name
        arguments = _arguments(function.get("arguments"))
        call.arguments.append(arguments)
        if call.index >= 0:
            return [_more(call, arguments)] if arguments else []
        return [self._announce(call)] if call.name else []

    def _call_of(self, index: int | None, given_id: str, name: str) -> _Call:
        """Find a delta's call: a new id with a name begins a new one, also on an old index."""
        if index is None and self._calls:
            last = self._calls[-1]
            if not (given_id or name) or (given_id == last.given_id and not _is_arguments(last.text)):
                return last
        call = self._by_index.get(index) if index is not None else None
        if call is None or (given_id and call.given_id and given_id != call.given_id and name):
            call = _Call()
            self._calls.append(call)
            if index is not None:
                self._by_index[index] = call
        return call

    def _announce(self, call: _Call) -> dict[str, Any]:
        call.index = self._told
        self._told += 1
        taken = {other.id for other in self._calls}
        if not call.given_id or call.given_id in taken:
            self._note("call_id")
            call.given_id = f"call_{uuid.uuid4().hex[:24]}"
        call.id = call.given_id
        return {
            "index": call.index,
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.text},
        }

    def add(self, written: list[WrittenCall]) -> list[dict[str, Any]]:
        """Take calls that were found in the text."""
        deltas = [
            {"function": {"name": call.name, "arguments": call.arguments}, "id": ""} for call in written
        ]
        return self.take(deltas)

    def finish(self) -> tuple[list[dict[str, Any]], bool]:
        """Return last deltas, and whether every call is whole. Calls without arguments get `{}`."""
        last = []
        whole = True
        for call in self._calls:
            if call.index < 0:
                self._note("nameless_call")
                whole = False
            elif not call.text.strip():
                call.arguments.append("{}")
                last.append(_more(call, "{}"))
            elif not _is_arguments(call.text):
                self._note("broken_arguments")
                whole = False
        return last, whole

    def whole(self) -> list[dict[str, Any]]:
        """Return the calls of an answer in one piece."""
        told = sorted((call for call in self._calls if call.index >= 0), key=lambda call: call.index)
        return [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.text}}
            for call in told
        ]


def _more(call: _Call, arguments: str) -> dict[str, Any]:
    return {"index": call.index, "function": {"arguments": arguments}}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _arguments(value: Any) -> str:
    """Some engines give the object itself instead of its JSON."""
    if value is None or isinstance(value, str):
        return value or ""
    return msgspec.json.encode(value).decode()


def _is_arguments(text: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(text), dict | None)
    except (msgspec.DecodeError, RecursionError):
        return False
