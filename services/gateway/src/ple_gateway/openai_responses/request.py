"""A Responses request as a chat request; what would need state or tools of OpenAI's is refused by name."""

from collections.abc import Iterator
from typing import Any

from ple_gateway.errors import GatewayError, invalid
from ple_gateway.openai_responses.history import History

_SAME = (
    *("model", "temperature", "top_p", "stream", "parallel_tool_calls", "user", "metadata"),
    *("seed", "stop", "top_k", "min_p", "presence_penalty", "frequency_penalty", "chat_template_kwargs"),
)
_STATE = {
    "previous_response_id": "Responses are not stored: send the whole history in `input`.",
    "conversation": "Conversations are not stored: send the whole history in `input`.",
    "background": "Responses are not stored: use `stream` for long answers.",
    "prompt": "Prompt templates are not stored: send `instructions` and `input`.",
}
_CHOICES = frozenset({"auto", "none", "required"})


def chat_request(body: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """Return the chat request, and how the client calls its messages; raises GatewayError 400."""
    for name, hint in _STATE.items():
        if body.get(name):
            raise invalid(f"`{name}` is not supported. {hint}", param=name, code="unsupported_parameter")
    request = {name: body[name] for name in _SAME if body.get(name) is not None}
    if body.get("max_output_tokens") is not None:
        request["max_completion_tokens"] = _positive("max_output_tokens", body["max_output_tokens"])
    history = History()
    history.add_instructions(body.get("instructions"))
    history.add_input(body.get("input"))
    request["messages"] = history.messages
    tools = list(_tools(body.get("tools")))
    if tools:
        request["tools"] = tools
    request.update(_tool_choice(body.get("tool_choice"), tools))
    request.update(_effort(body.get("reasoning")))
    request.update(_format(body.get("text")))
    if body.get("stream") is True:
        request["stream_options"] = {"include_usage": True}
    return request, history.origins


def _positive(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _wrong(name, "a positive integer")
    return value


def _tools(tools: Any) -> Iterator[dict[str, Any]]:
    if not isinstance(tools, list | None):
        raise _wrong("tools", "a list")
    for index, tool in enumerate(tools or []):
        if not isinstance(tool, dict):
            raise _wrong(f"tools[{index}]", "an object")
        if tool.get("type") != "function":
            kind = str(tool.get("type"))[:100]
            raise invalid(
                f"Tools of type {kind!r} are not available here; only type function is.",
                param=f"tools[{index}]",
                code="unsupported_parameter",
            )
        fields = ("name", "description", "parameters", "strict")
        function = {name: tool[name] for name in fields if tool.get(name) is not None}
        yield {"type": "function", "function": function}


def _tool_choice(choice: Any, tools: list[dict[str, Any]]) -> dict[str, Any]:
    if choice is None:
        return {}
    if isinstance(choice, str) and choice in _CHOICES:
        return {"tool_choice": choice}
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "function" and isinstance(choice.get("name"), str):
        return {"tool_choice": {"type": "function", "function": {"name": choice["name"]}}}
    if kind == "allowed_tools" and isinstance(choice.get("tools"), list):
        names = [tool.get("name") for tool in choice["tools"] if isinstance(tool, dict)]
        allowed = [tool for tool in tools if tool["function"].get("name") in names]
        return {"tools": allowed, "tool_choice": choice.get("mode", "auto")}
    raise invalid(
        "`tool_choice` must be auto, none, required, or of type function or allowed_tools.",
        param="tool_choice",
    )


def _effort(reasoning: Any) -> dict[str, Any]:
    effort = reasoning.get("effort") if isinstance(reasoning, dict) else None
    if effort is None:
        return {}
    if not isinstance(effort, str):
        raise _wrong("reasoning.effort", "a string")
    return {"reasoning_effort": effort}


def _format(text: Any) -> dict[str, Any]:
    """`text.format` has the schema's fields beside its type, chat has them one level below."""
    form = text.get("format") if isinstance(text, dict) else None
    if form is None:
        return {}
    if not isinstance(form, dict):
        raise _wrong("text.format", "an object")
    if form.get("type") != "json_schema":
        return {"response_format": form}
    schema = {name: value for name, value in form.items() if name != "type" and value is not None}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _wrong(name: str, what: str) -> GatewayError:
    return invalid(f"`{name}` must be {what}.", param=name)
