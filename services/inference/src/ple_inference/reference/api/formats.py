"""response_format and tool_choice to a grammar."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from ple_inference.reference.api.errors import bad_request, unavailable
from ple_inference.reference.api.parameters import ChatBody
from ple_inference.reference.grammar import GrammarBusyError, GrammarCompiler, GrammarError, GrammarState

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
NewGrammar = Callable[[], GrammarState] | None


async def format_grammar(compiler: GrammarCompiler, response_format: dict[str, Any]) -> NewGrammar:
    """Raises ApiError, param response_format."""
    kind = response_format.get("type")
    try:
        match kind:
            case "text":
                return None
            case "json_object":
                return await compiler.any_object()
            case "json_schema":
                return await compiler.schema(_schema_of(response_format))
    except GrammarError as error:
        raise bad_request(f"the schema cannot be used: {error}", "response_format") from error
    except GrammarBusyError as error:
        raise unavailable(str(error)) from error
    raise bad_request(f"unknown type {kind!r}", "response_format")


def _schema_of(response_format: dict[str, Any]) -> Any:
    holder = response_format.get("json_schema")
    if not isinstance(holder, dict) or not isinstance(holder.get("schema"), dict | bool):
        raise bad_request("json_schema needs an object `schema`", "response_format")
    if not _NAME.fullmatch(str(holder.get("name", ""))):
        raise bad_request("json_schema needs a name of letters, digits, _ and -", "response_format")
    return holder["schema"]


async def tool_grammar(compiler: GrammarCompiler, body: ChatBody) -> NewGrammar:
    """A grammar where a call is demanded; None where the model may choose. Raises ApiError."""
    demanded = demanded_tools(body)
    if not demanded:
        return None
    try:
        # One named function is called once.
        parallel = body.parallel_tool_calls and body.tool_choice == "required"
        return await compiler.tool_calls(demanded, parallel=parallel)
    except GrammarError as error:
        raise bad_request(f"the tools' parameters cannot be used: {error}", "tools") from error
    except GrammarBusyError as error:
        raise unavailable(str(error)) from error


def _check_tool(tool: dict[str, Any], place: str) -> None:
    """Raises ApiError unless the tool has the form that templates and the parser of answers rely on."""
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict):
        raise bad_request(f"{place} must be a function with a name", "tools")
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise bad_request(f"{place} must be a function with a name", "tools")
    parameters = function.get("parameters") or {}
    if not isinstance(parameters, dict) or not isinstance(parameters.get("properties") or {}, dict):
        raise bad_request(f"{place}.function.parameters must be a JSON schema", "tools")


def demanded_tools(body: ChatBody) -> list[dict[str, Any]]:
    """Tools of which one must be called; empty for auto and none. Raises ApiError."""
    for place, tool in enumerate(body.tools):
        _check_tool(tool, f"tools[{place}]")
    if isinstance(body.tool_choice, dict):
        function = body.tool_choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        named = [tool for tool in body.tools if tool["function"]["name"] == name]
        if not named:
            raise bad_request(f"tool_choice names {name!r}, which is not among tools", "tool_choice")
        return named
    if body.tool_choice not in ("auto", "none", "required"):
        raise bad_request(f"unknown tool_choice {body.tool_choice!r}", "tool_choice")
    if body.tool_choice == "required" and not body.tools:
        raise bad_request("tool_choice required needs tools", "tool_choice")
    return body.tools if body.tool_choice == "required" else []
