"""A Messages request as a chat request. What means nothing here, such as `cache_control`, is left out."""

from collections.abc import Iterator
from typing import Any

import msgspec

from ple_gateway.errors import GatewayError, invalid
from ple_gateway.messages import Message, Origin, Part

_SAME = ("model", "max_tokens", "temperature", "top_p", "top_k", "stream")
_MAX_STOPS = 4
_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "xhigh", "max": "xhigh"}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def wants_thinking(body: dict[str, Any]) -> bool:
    """Whether thoughts are wanted: not unless asked for, as in Anthropic's API."""
    thinking = body.get("thinking")
    return isinstance(thinking, dict) and thinking.get("type") != "disabled"


def chat_request(body: dict[str, Any]) -> tuple[dict[str, Any], list[Origin]]:
    """Return the chat request, and how the client calls its messages; raises GatewayError 400."""
    request = {name: body[name] for name in _SAME if body.get(name) is not None}
    history = _History()
    history.add_system(body.get("system"))
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise invalid("`messages` must be a list with at least one message.", param="messages")
    for index, message in enumerate(messages):
        history.add(message, f"messages[{index}]")
    request["messages"] = history.messages
    if body.get("stop_sequences"):
        request["stop"] = _stops(body["stop_sequences"])
    if body.get("tools"):
        request["tools"] = list(_tools(body["tools"]))
    request.update(_tool_choice(body.get("tool_choice")))
    request["chat_template_kwargs"] = {"enable_thinking": wants_thinking(body)}
    request.update(_output(body))
    if body.get("stream") is True:
        # The engine then tells the prompt's length with its first chunk, in time for message_start.
        request["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    return request, history.origins


class _History:
    """Messages as they are built, each with its origin."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.origins: list[Origin] = []

    def add_system(self, system: Any) -> None:
        if system:
            self._append({"role": "system", "content": system}, "system", "system[{}]")

    def _append(self, message: Any, name: str, part: str, parts: list[int] | None = None) -> None:
        content = message.get("content") if isinstance(message, dict) else None
        count = len(content) if isinstance(content, list) else 0
        numbers = parts if parts is not None else range(count)
        self.messages.append(message)
        self.origins.append(Origin(name, [part.format(number) for number in numbers]))

    def add(self, message: Any, name: str) -> None:
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(content, list):
            self._append(message, name, "{}")
        elif message.get("role") == "assistant":
            self._add_assistant(content, name)
        else:
            self._add_user(message.get("role"), content, name)

    def _add_user(self, role: Any, blocks: list[Any], name: str) -> None:
        """Results of tools become messages of their own, before what the user says beside them."""
        rest: list[tuple[Any, int]] = []
        for index, block in enumerate(blocks):
            if isinstance(block, dict) and block.get("type") == "tool_result":
                self._add_result(block, f"{name}.content[{index}]")
            else:
                rest += [(part, index) for part in _plain(block, f"{name}.content[{index}]")]
        if rest or not blocks:
            message = {"role": role, "content": [part for part, _ in rest]}
            self._append(message, name, name + ".content[{}]", [index for _, index in rest])

    def _add_result(self, block: dict[str, Any], name: str) -> None:
        content = block.get("content") or []
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(blocks, list):
            raise invalid("The content of a tool's result must be a string or a list of blocks.", param=name)
        parts = [({"type": "text", "text": "[error]"}, 0)] if block.get("is_error") else []
        for index, inner in enumerate(blocks):
            parts += [(part, index) for part in _plain(inner, f"{name}.content[{index}]")]
        numbers = [index for _, index in parts]
        content = [part for part, _ in parts]
        message = {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content}
        self._append(message, name, name + ".content[{}]", numbers)

    def _add_assistant(self, blocks: list[Any], name: str) -> None:
        message: Message = {"role": "assistant"}
        thoughts: list[str] = []
        calls: list[dict[str, Any]] = []
        rest: list[tuple[Any, int]] = []
        for index, block in enumerate(blocks):
            kind = block.get("type") if isinstance(block, dict) else None
            if kind == "thinking":
                thoughts.append(str(block.get("thinking") or ""))
            elif kind == "tool_use":
                calls.append(_call(block))
            else:
                rest.append((block, index))
        message["content"] = [block for block, _ in rest]
        if any(thoughts):
            message["reasoning"] = "\n".join(thoughts)
        if calls:
            message["tool_calls"] = calls
        self._append(message, name, name + ".content[{}]", [index for _, index in rest])


def _plain(block: Any, name: str) -> Iterator[Part]:
    """Yield a user's block as parts: documents of plain text as text, the rest as it is."""
    if not isinstance(block, dict) or block.get("type") != "document":
        yield block
        return
    source = block.get("source")
    source = source if isinstance(source, dict) else {}
    if source.get("type") == "text" and isinstance(source.get("data"), str):
        yield {"type": "text", "text": source["data"]}
    elif source.get("type") == "content" and isinstance(source.get("content"), str):
        yield {"type": "text", "text": source["content"]}
    elif source.get("type") == "content" and isinstance(source.get("content"), list):
        yield from source["content"]
    else:
        raise invalid("Only documents of plain text are supported.", param=name)


def _call(block: dict[str, Any]) -> dict[str, Any]:
    arguments = msgspec.json.encode(block.get("input") or {}).decode()
    function = {"name": block.get("name"), "arguments": arguments}
    return {"id": block.get("id"), "type": "function", "function": function}


def _stops(stops: Any) -> list[str]:
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise _wrong("stop_sequences", "a list of strings, none of them empty")
    if len(stops) > _MAX_STOPS:
        raise invalid(f"`stop_sequences` takes up to {_MAX_STOPS} strings.", param="stop_sequences")
    return stops


def _tools(tools: Any) -> Iterator[dict[str, Any]]:
    if not isinstance(tools, list):
        raise _wrong("tools", "a list")
    for index, tool in enumerate(tools):
        name = f"tools[{index}]"
        if not isinstance(tool, dict):
            raise _wrong(name, "an object")
        kind = tool.get("type") or "custom"
        if kind != "custom":
            raise invalid(
                f"Tools of type {str(kind)[:100]!r} are not available here; "
                "declare a tool with `name` and `input_schema`.",
                param=name,
            )
        schema = tool.get("input_schema")
        if schema is not None and not isinstance(schema, dict):
            raise _wrong(f"{name}.input_schema", "a JSON schema")
        function = {"name": tool.get("name"), "parameters": schema or {"type": "object", "properties": {}}}
        if isinstance(tool.get("description"), str):
            function["description"] = tool["description"]
        yield {"type": "function", "function": function}


def _tool_choice(choice: Any) -> dict[str, Any]:
    if choice is None:
        return {}
    kind = choice.get("type") if isinstance(choice, dict) else None
    chosen: dict[str, Any] = {}
    if kind == "tool" and isinstance(choice.get("name"), str):
        chosen["tool_choice"] = {"type": "function", "function": {"name": choice["name"]}}
    elif isinstance(kind, str) and kind in _CHOICES:
        chosen["tool_choice"] = _CHOICES[kind]
    else:
        raise invalid("`tool_choice.type` must be auto, any, none, or tool with `name`.", param="tool_choice")
    if choice.get("disable_parallel_tool_use") is True:
        chosen["parallel_tool_calls"] = False
    return chosen


def _output(body: dict[str, Any]) -> dict[str, Any]:
    """Read `output_config`: the effort of thinking, and the schema of the answer."""
    config = body.get("output_config")
    config = config if isinstance(config, dict) else {}
    output: dict[str, Any] = {}
    effort = _EFFORTS.get(str(config.get("effort")))
    if effort and wants_thinking(body):
        output["reasoning_effort"] = effort
    form = config.get("format") or body.get("output_format")
    if form is None:
        return output
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        raise invalid("The output's format must be of type json_schema.", param="output_config.format")
    schema = {"name": "answer", "schema": form.get("schema")}
    return {**output, "response_format": {"type": "json_schema", "json_schema": schema}}


def _wrong(name: str, what: str) -> GatewayError:
    return invalid(f"`{name}` must be {what}.", param=name)
