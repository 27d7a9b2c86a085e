"""Messages to a prompt, by the checkpoint's own chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

_ROLES = frozenset({"system", "user", "assistant", "tool"})
_IMAGE_PARTS = frozenset({"image_url", "input_image", "image"})


class MessageError(Exception):
    """Messages that make no prompt; one line for the client."""


@dataclass(frozen=True)
class RenderedChat:
    """A prompt's text, one placeholder for each image, and the images' URLs in order."""

    text: str
    image_urls: list[str]

    @property
    def thinking(self) -> bool:
        """Whether the answer begins inside a think block."""
        return self.text.rstrip("\n").endswith("<think>")


class ChatTemplate:
    """chat_template.jinja of a checkpoint."""

    def __init__(self, folder: Path) -> None:
        path = folder / "chat_template.jinja"
        self._template = _compile(path.read_text()) if path.exists() else None

    def render(
        self, messages: Sequence[dict[str, Any]], tools: list[dict[str, Any]], options: dict[str, Any]
    ) -> RenderedChat:
        """Raises MessageError, also for what the template itself refuses."""
        if self._template is None:
            raise MessageError("this model has no chat template; use /v1/completions")
        urls: list[str] = []
        cleaned = [_clean(place, message, urls) for place, message in enumerate(messages)]
        try:
            text = self._template.render(
                options, messages=_join_system(cleaned), tools=tools or None, add_generation_prompt=True
            )
        except RecursionError as error:
            raise MessageError("messages or tools are nested too deeply") from error
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise MessageError(str(error)) from error
        return RenderedChat(text, urls)


def _compile(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    # Unlike jinja's own: no HTML escapes, the order of keys is kept.
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    environment.globals["raise_exception"] = _refuse
    return environment.from_string(source)


def _refuse(reason: str) -> None:
    raise jinja2.TemplateError(reason)


def _clean(place: int, message: dict[str, Any], urls: list[str]) -> dict[str, Any]:
    """One message as templates expect it; `urls` takes its images."""
    where = f"messages[{place}]"
    role = {"developer": "system"}.get(str(message.get("role")), message.get("role"))
    if role not in _ROLES:
        raise MessageError(f"{where}: unknown role {message.get('role')!r}")
    content = message.get("content")
    if isinstance(content, list):
        content = [_clean_part(f"{where}.content[{i}]", part, urls) for i, part in enumerate(content)]
        if role != "user" and all(part["type"] == "text" for part in content):
            content = "".join(part["text"] for part in content)
    elif content is None:
        content = ""
    elif not isinstance(content, str):
        raise MessageError(f"{where}.content must be a string or a list of parts")
    cleaned = {"role": role, "content": content}
    if role == "assistant":
        cleaned["reasoning_content"] = message.get("reasoning_content") or message.get("reasoning") or ""
        cleaned["tool_calls"] = [_clean_call(where, call) for call in message.get("tool_calls") or []]
    return cleaned


def _clean_part(where: str, part: Any, urls: list[str]) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in ("text", "input_text") and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind in _IMAGE_PARTS:
        url = part.get("image_url", part.get("image"))
        url = url.get("url") if isinstance(url, dict) else url
        if not isinstance(url, str):
            raise MessageError(f"{where} has no image URL")
        urls.append(url)
        return {"type": "image"}
    raise MessageError(f"{where}: parts of type {kind!r} are not supported")


def _clean_call(where: str, call: Any) -> dict[str, Any]:
    """Arguments come as JSON text and templates want the object; anything else becomes {}."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise MessageError(f"{where}: a tool call needs function.name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = {}
    return {
        "function": {"name": function["name"], "arguments": arguments if isinstance(arguments, dict) else {}}
    }


def _join_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Templates take one system message, at the beginning: join those that stand there."""
    count = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    if count < 2 or not all(isinstance(message["content"], str) for message in messages[:count]):
        return messages
    text = "\n\n".join(message["content"] for message in messages[:count] if message["content"])
    return [{"role": "system", "content": text}, *messages[count:]]
