"""One choice of an answer, streamed or in one piece: mended where the engine leaves it odd, and checked."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ple_gateway.errors import GatewayError, backend_lost
from ple_gateway.schemas import AnswerSchema
from ple_gateway.think_marker import ThinkMarkerFilter
from ple_gateway.tool_calls import Note, ToolCallRelay
from ple_gateway.tool_markup import MarkupWatch

_ENDED_BY_ITSELF = {"stop", "tool_calls", "function_call"}
_TEXTS = ("content", "reasoning", "reasoning_content", "refusal")
_ENDED_BY_FAILURE = {"abort", "error"}


@dataclass(frozen=True)
class Expected:
    """What an answer has to be, by its request."""

    schema: AnswerSchema | None
    may_be_empty: bool  # a stop string can end an answer before its first character
    tools: Mapping[str, Any]  # that may be called: a function's name -> its JSON schema
    repair_markup: bool  # turn calls that stand in the text into calls


class ChoiceRelay:
    """Takes the pieces of one choice and changes each to what the client gets.

    The role is told once; reasoning has both of its names; calls are as ToolCallRelay gives them; the finish
    reason agrees with what was delivered.
    """

    def __init__(self, expected: Expected, note: Note) -> None:
        self._expected = expected
        self._note = note
        self.calls = ToolCallRelay(note)
        self._markup = MarkupWatch(expected.tools, hold=expected.repair_markup) if expected.tools else None
        self._thoughts = MarkupWatch(expected.tools, hold=False) if expected.tools else None
        self._markers = ThinkMarkerFilter() if expected.schema else None
        self._text: list[str] = []  # kept only when a schema will be checked
        self._produced = False
        self._has_role = False
        self._whole = True  # no call was cut
        self.finished = False

    async def take(self, choice: dict[str, Any]) -> bool:
        """Rewrite the piece in place; whether it was changed. Raises GatewayError."""
        delta = choice.get("delta")
        reason = choice.get("finish_reason")
        if not isinstance(reason, str):
            reason = choice["finish_reason"] = None
        changed = not isinstance(delta, dict) and "text" not in choice
        if changed:
            delta = choice["delta"] = {}
        if self.finished:
            choice["finish_reason"] = None
            if isinstance(delta, dict):
                choice["delta"] = {}
            else:
                choice["text"] = ""
            return True
        if isinstance(delta, dict):
            changed = self._take_delta(delta) or changed
        else:
            self._take_text(choice)
        if not reason:
            return changed
        if isinstance(delta, dict):
            changed = self._flush(delta, reason) or changed
        final = self._final_reason(reason)
        await self._check(final)
        self.finished = True
        choice["finish_reason"] = final
        return changed or final != reason

    def _take_text(self, choice: dict[str, Any]) -> None:
        """A text completion's piece."""
        text = choice.get("text")
        if isinstance(text, str) and text:
            self._keep(text)

    def _keep(self, text: str) -> None:
        self._produced = True
        if self._expected.schema:
            self._text.append(text)

    def _take_delta(self, delta: dict[str, Any]) -> bool:
        changed = _drop_what_is_no_text(delta)
        changed = self._tell_role(delta) or changed
        changed = name_reasoning_twice(delta) or changed
        if delta.get("reasoning"):
            self._produced = True
            if self._thoughts:
                self._thoughts.feed(delta["reasoning"])
        if delta.get("refusal"):
            self._produced = True
        content = delta.get("content")
        if content:
            delta["content"] = self._filtered(content)
            changed = changed or delta["content"] != content
            if delta["content"]:
                self._keep(delta["content"])
        if "tool_calls" in delta:
            changed = self._take_calls(delta) or changed
        return changed

    def _tell_role(self, delta: dict[str, Any]) -> bool:
        if self._has_role:
            return delta.pop("role", None) is not None
        self._has_role = True
        if delta.get("role") == "assistant":
            return False
        delta["role"] = "assistant"
        return True

    def _filtered(self, content: str) -> str:
        if self._markers:
            content = self._markers.feed(content)
        return self._markup.feed(content) if self._markup else content

    def _take_calls(self, delta: dict[str, Any]) -> bool:
        given = delta["tool_calls"]
        sent = self.calls.take(given)
        if sent == given:
            return False
        if sent:
            delta["tool_calls"] = sent
        else:
            del delta["tool_calls"]
        return True

    def _flush(self, delta: dict[str, Any], reason: str) -> bool:
        """Give what was held back; whether there was anything."""
        text = self._markers.finish() if self._markers else ""
        if self._markers and self._markers.found:
            self._note("think_marker")
        calls: list[dict[str, Any]] = []
        if self._markup:
            text = self._markup.feed(text)
            held, written = self._markup.finish()
            if written and reason in _ENDED_BY_ITSELF:
                self._note("tool_markup_repaired")
                calls = self.calls.add(written)
            else:
                text += held
                if self._markup.seen:
                    self._note("tool_markup")
        if self._thoughts and self._thoughts.seen:
            self._note("tool_markup_in_reasoning")
        if text:
            delta["content"] = (delta.get("content") or "") + text
            self._keep(text)
        if calls:
            delta["tool_calls"] = delta.get("tool_calls", []) + calls
        return bool(text or calls) | self._end_calls(delta, reason)

    def _end_calls(self, delta: dict[str, Any], reason: str) -> bool:
        if reason not in _ENDED_BY_ITSELF:
            return False
        last, self._whole = self.calls.finish()
        if last:
            delta["tool_calls"] = delta.get("tool_calls", []) + last
        return bool(last)

    def _final_reason(self, reason: str) -> str:
        """The engine's reason, in agreement with the calls that were delivered."""
        if reason in _ENDED_BY_FAILURE:
            raise backend_lost("The engine gave the answer up.")
        if reason not in _ENDED_BY_ITSELF:
            return reason
        if not self._whole:
            return "length"
        if self.calls.told:
            return "tool_calls"
        return "stop"

    async def _check(self, reason: str) -> None:
        if reason != "stop":
            return
        if not self._produced and not self._expected.may_be_empty:
            raise empty_answer()
        if self._expected.schema:
            await self._expected.schema.check_answer("".join(self._text))


def _drop_what_is_no_text(delta: dict[str, Any]) -> bool:
    odd = [name for name in _TEXTS if delta.get(name) is not None and not isinstance(delta[name], str)]
    for name in odd:
        del delta[name]
    return bool(odd)


def name_reasoning_twice(message: dict[str, Any]) -> bool:
    """Give `reasoning` its other common name too, and the other way round; whether anything changed."""
    reasoning = message.get("reasoning")
    other = message.get("reasoning_content")
    if reasoning is not None and "reasoning_content" not in message:
        message["reasoning_content"] = reasoning
        return True
    if other is not None and "reasoning" not in message:
        message["reasoning"] = other
        return True
    return False


def empty_answer() -> GatewayError:
    """Return the error for an engine that said it was done and produced nothing."""
    return GatewayError(502, "The engine produced an empty answer.", code="empty_answer", may_retry=False)
