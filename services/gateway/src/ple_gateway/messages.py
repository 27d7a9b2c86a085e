"""Chat messages: checked, and brought into the one form that engines and chat templates agree on."""

import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ple_gateway.errors import GatewayError, invalid
from ple_gateway.images.parts import is_picture, picture_url

_LOG = logging.getLogger(__name__)

Part = dict[str, Any]
Message = dict[str, Any]

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_TEXTS = frozenset({"text", "input_text", "output_text"})
_THOUGHTS = frozenset({"thinking", "redacted_thinking", "reasoning"})
# One coding client puts a line that changes with every request at the head of its prompt: no prefix
# would ever be found in the cache again.
_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?")


@dataclass(frozen=True)
class Origin:
    """What a client calls a message that was made from another form, and its parts."""

    name: str  # "messages[2]"
    parts: Sequence[str] = field(default=())  # "messages[2].content[1]"

    def part(self, index: int) -> str:
        """The name of a part of the message's content."""
        return self.parts[index] if index < len(self.parts) else f"{self.name}.content[{index}]"


@dataclass(frozen=True)
class ImagePlace:
    """Where an image part stands in the rewritten messages, and how the client would call the place."""

    parts: list[Part]
    index: int
    name: str  # "messages[2].content[1]"
    fresh: bool  # no answer has been given to it yet
    from_tool: bool

    @property
    def url(self) -> str:
        """The part's URL."""
        url: str = self.parts[self.index]["image_url"]["url"]
        return url

    def put_url(self, url: str) -> None:
        """Give the part another URL, and drop what engines do not need to know."""
        self.parts[self.index] = {"type": "image_url", "image_url": {"url": url}}

    def put_note(self, text: str) -> None:
        """Put a text in the image's place."""
        self.parts[self.index] = {"type": "text", "text": text}


class Conversation:
    """The messages of one request.

    System messages are merged at the front and become marked user text further back, where the chat template
    refuses them and where moving them would change the cached prefix. Tool results become plain text; their
    images move into the user turn that follows.
    """

    def __init__(self, messages: Any, origins: Sequence[Origin] | None = None) -> None:
        """Raises GatewayError 400 naming the message and part."""
        if not isinstance(messages, list) or not messages:
            raise invalid("`messages` must be a list with at least one message.", param="messages")
        self.messages: list[Message] = []
        self.images: list[ImagePlace] = []
        self._from_tools: list[tuple[Part, str]] = []  # images that wait for a user turn
        fresh = _first_unanswered(messages)
        for index, message in enumerate(messages):
            self._fresh = index >= fresh
            self._add(message, origins[index] if origins else Origin(f"messages[{index}]"))
        self._flush_tool_images()
        self._need_a_user()
        self._note_strays()

    def _add(self, message: Any, origin: Origin) -> None:
        name = origin.name
        if not isinstance(message, dict):
            raise _wrong(name, "an object")
        message = {key: value for key, value in message.items() if value is not None}
        role = message.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise invalid(f"The role must be one of {', '.join(sorted(_ROLES))}.", param=f"{name}.role")
        if role != "tool" and not (role == "user" and self._from_tools):
            self._flush_tool_images()
        parts = list(_parts(message, origin))
        if role in {"system", "developer"}:
            self._add_system(_text(parts, f"{name}.content"))
        elif role == "user":
            if "content" not in message:
                raise invalid("A user message needs `content`.", param=f"{name}.content")
            self._add_user(message, parts)
        elif role == "assistant":
            self.messages.append(_assistant(message, parts, name))
        else:
            self._add_tool(message, parts, name)

    def _need_a_user(self) -> None:
        """The chat template refuses a conversation without a user: it gets an empty turn of one."""
        if not any(message["role"] == "user" for message in self.messages):
            begins_with_system = self.messages[0]["role"] == "system"
            self.messages.insert(int(begins_with_system), {"role": "user", "content": ""})

    def _note_strays(self) -> None:
        """Results of calls that nobody made are left to the engine: histories are cut at any place."""
        called: set[Any] = set()
        strays = 0
        for message in self.messages:
            if message["role"] == "assistant":  # checked; elsewhere the field may be anything
                called |= {call.get("id") for call in message.get("tool_calls", [])}
            strays += message["role"] == "tool" and message.get("tool_call_id") not in called
        if strays:
            _LOG.debug("tool results without their call: %d", strays)

    def _add_system(self, text: str) -> None:
        if not self.messages:
            self.messages.append({"role": "system", "content": text})
        elif len(self.messages) == 1 and self.messages[0]["role"] == "system":
            self.messages[0]["content"] += "\n\n" + text
        else:
            self.messages.append({"role": "user", "content": f"[system]\n{text}"})

    def _add_user(self, message: Message, parts: list[tuple[Part, str]]) -> None:
        from_tools = len(self._from_tools)
        parts = self._from_tools + parts
        self._from_tools = []
        content = [part for part, _ in parts]
        for index, (part, place) in enumerate(parts):
            if part["type"] == "image_url":
                self.images.append(ImagePlace(content, index, place, self._fresh, index < from_tools))
        if len(content) <= 1 and all(part["type"] == "text" for part in content):
            self.messages.append({**message, "content": "".join(part["text"] for part in content)})
        else:
            self.messages.append({**message, "content": content})

    def _add_tool(self, message: Message, parts: list[tuple[Part, str]], name: str) -> None:
        if not isinstance(message.get("tool_call_id", ""), str):
            raise _wrong(f"{name}.tool_call_id", "a string")
        texts = [entry for entry in parts if entry[0]["type"] == "text"]
        self._from_tools += [entry for entry in parts if entry[0]["type"] != "text"]
        self.messages.append({**message, "content": _text(texts, name)})

    def _flush_tool_images(self) -> None:
        """Images of tool results that no user message follows get one of their own."""
        if self._from_tools:
            self._add_user({"role": "user"}, [])


def _first_unanswered(messages: list[Any]) -> int:
    """Index of the first message after the last answer; one at the very end is still being written."""
    roles = [message.get("role") if isinstance(message, dict) else None for message in messages]
    while roles and roles[-1] == "assistant":
        roles.pop()
    return len(roles) - roles[::-1].index("assistant") if "assistant" in roles else 0


def _parts(message: Message, origin: Origin) -> Iterator[tuple[Part, str]]:
    """Yield (part, its name): text as `text`, images as `image_url` with an object, thoughts left out."""
    content = message.get("content", [])
    if isinstance(content, str):
        yield {"type": "text", "text": _BILLING.sub("", content)}, f"{origin.name}.content"
        return
    if not isinstance(content, list):
        raise _wrong(f"{origin.name}.content", "a string or a list of parts")
    for index, part in enumerate(content):
        place = origin.part(index)
        normal = _part(part, place)
        if normal and normal["type"] == "text" and _BILLING.match(normal["text"]):
            normal["text"] = _BILLING.sub("", normal["text"])
            normal = normal if normal["text"] else None
        if normal:
            yield normal, place


def _part(part: Any, name: str) -> Part | None:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, dict):
        raise _wrong(name, "an object")
    if is_picture(part):
        return {"type": "image_url", "image_url": {"url": _image_url(part, name)}}
    kind = part.get("type") or ("text" if "text" in part else None)
    if not isinstance(kind, str):
        raise invalid("A part needs a `type`.", param=name)
    if kind in _TEXTS:
        if not isinstance(part.get("text"), str):
            raise _wrong(f"{name}.text", "a string")
        return {"type": "text", "text": part["text"]}
    if kind == "refusal":
        return {"type": "text", "text": str(part.get("refusal", ""))}
    if kind in _THOUGHTS:
        return None
    raise invalid(f"Parts of type {kind[:100]!r} are not supported; use text or image_url.", param=name)


def _image_url(part: Part, name: str) -> str:
    url = picture_url(part)
    if url:
        return url
    if "file_id" in part:
        raise invalid("Uploaded files are not known here; send the image as a data URL.", param=name)
    raise invalid('An image part needs {"image_url": {"url": "data:..."}}.', param=name)


def _text(parts: list[tuple[Part, str]], name: str) -> str:
    for part, place in parts:
        if part["type"] != "text":
            raise invalid("Only text is supported in this role.", param=place or name)
    return "\n".join(part["text"] for part, _ in parts)


def _assistant(message: Message, parts: list[tuple[Part, str]], name: str) -> Message:
    """A turn of the model: content is a string, null only beside calls; reasoning has both its names."""
    calls = message.pop("tool_calls", [])
    if not isinstance(calls, list):
        raise _wrong(f"{name}.tool_calls", "a list")
    text = _text(parts, f"{name}.content")
    turn = {**message, "content": text or (None if calls else "")}
    if calls:
        turn["tool_calls"] = [_call(call, f"{name}.tool_calls[{index}]") for index, call in enumerate(calls)]
    for reasoning, other in (("reasoning", "reasoning_content"), ("reasoning_content", "reasoning")):
        if isinstance(turn.get(reasoning), str):
            turn.setdefault(other, turn[reasoning])
    return turn


def _call(call: Any, name: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid("A tool call needs `function` with `name` and `arguments`.", param=name)
    if not isinstance(call.get("id", ""), str | None):
        raise _wrong(f"{name}.id", "a string")
    arguments = function.get("arguments")
    if arguments in (None, "", "null"):
        arguments = "{}"
    if not isinstance(arguments, str):
        raise _wrong(f"{name}.function.arguments", "a string of JSON")
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def _wrong(name: str, what: str) -> GatewayError:
    return invalid(f"`{name}` must be {what}.", param=name)
