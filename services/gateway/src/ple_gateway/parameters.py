"""Check what a generation request asks for, beside its messages."""

import logging
import re
from collections.abc import Callable
from functools import cache
from typing import Any

from ple_gateway.errors import GatewayError, invalid

_LOG = logging.getLogger(__name__)
_REFUSED = {
    "chat_template": "The chat template is the server's.",
    "chat_template_content_format": "The chat template is the server's.",
    "media_io_kwargs": "Media options are the server's.",
    "mm_processor_kwargs": "Media options are the server's.",
    "kv_transfer_params": "It is internal to the engine.",
    "vllm_xargs": "It is internal to the engine.",
    "prompt_embeds": "Prompts are text or token ids.",
    "priority": "Priorities are the server's.",
    "structured_outputs": "Use `response_format`.",
    "guided_json": "Use `response_format` with `json_schema`.",
    "functions": "Use `tools`.",
    "function_call": "Use `tool_choice`.",
}
MAX_STOPS = 4
MAX_TOOLS = 2_000
_MAX_BIASES = 20_000
_LEAST_TOP_P = 1e-6  # OpenAI takes 0 for "the likeliest token"; engines want more than 0
_PLAIN_NAME = re.compile(r"[a-z][a-z0-9_]{0,40}")  # others may be anything, and are not logged
_NUMERIC_KEY = re.compile(r"[0-9]{1,10}")
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_.:-]{1,128}")
_INT64 = 2**63


def check_parameters(request: dict[str, Any], max_choices: int) -> None:
    """Drop null fields and check ranges, in place; raises GatewayError 400 naming the parameter.

    Unknown fields stay, with a line in the log: the engine may know them.
    """
    for name in [name for name, value in request.items() if value is None]:
        del request[name]
    _refuse(request)
    for name, (low, high) in NUMBERS.items():
        if name in request:
            _check_number(name, request[name], low, high)
    for name, (lowest, highest) in integers(max_choices).items():
        if name in request:
            request[name] = _checked_integer(name, request[name], lowest, highest)
    for name, check in _SHAPES.items():
        if name in request:
            check(request[name])
    _check_combinations(request)
    if request.get("top_p") == 0:
        request["top_p"] = _LEAST_TOP_P
    unknown = sorted(name for name in request.keys() - _known() if _PLAIN_NAME.fullmatch(name))
    if unknown:
        _LOG.debug("fields that the gateway does not know: %s", ", ".join(unknown)[:500])


NUMBERS: dict[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "frequency_penalty": (-2, 2),
    "presence_penalty": (-2, 2),
}


def integers(max_choices: int) -> dict[str, tuple[int, int]]:
    """Name -> (lowest, highest) of every parameter that is an integer."""
    return {
        "max_tokens": (1, _INT64),
        "max_completion_tokens": (1, _INT64),
        "min_tokens": (0, _INT64),
        "n": (1, max_choices),
        "seed": (-_INT64, _INT64 - 1),
        "top_logprobs": (0, 20),
        "top_k": (-1, _INT64),
    }


def _refuse(request: dict[str, Any]) -> None:
    for name in request:
        hint = _REFUSED.get(name) or ("Use `response_format`." if name.startswith("guided_") else None)
        if hint:
            raise invalid(f"`{name}` is not accepted. {hint}", param=name, code="unsupported_parameter")
    options = request.get("chat_template_kwargs")
    if options is not None and not isinstance(options, dict):
        raise _wrong("chat_template_kwargs", "an object")
    if isinstance(options, dict) and "chat_template" in options:
        raise invalid(
            f"`chat_template` is not accepted. {_REFUSED['chat_template']}",
            param="chat_template_kwargs.chat_template",
            code="unsupported_parameter",
        )


def _check_number(name: str, value: Any, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong(name, "a number")
    if not low <= value <= high:
        raise invalid(f"`{name}` must be between {low:g} and {high:g}.", param=name)


def _checked_integer(name: str, value: Any, low: int, high: int) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong(name, "an integer")
    if not low <= value <= high:
        raise invalid(f"`{name}` must be at least {low} and at most {high}.", param=name)
    return value


def _check_flag(name: str) -> Callable[[Any], None]:
    def check(value: Any) -> None:
        if not isinstance(value, bool):
            raise _wrong(name, "a boolean")

    return check


def _check_stop(value: Any) -> None:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise _wrong("stop", "a string or a list of strings")
    if len(stops) > MAX_STOPS or "" in stops:
        raise invalid(f"`stop` takes up to {MAX_STOPS} strings, none of them empty.", param="stop")


def _check_logit_bias(value: Any) -> None:
    if not isinstance(value, dict):
        raise _wrong("logit_bias", "an object")
    if len(value) > _MAX_BIASES:
        raise invalid(f"`logit_bias` takes up to {_MAX_BIASES} tokens.", param="logit_bias")
    for key, bias in value.items():
        if not _NUMERIC_KEY.fullmatch(key) or isinstance(bias, bool) or not isinstance(bias, int | float):
            raise invalid("`logit_bias` maps token ids to numbers.", param="logit_bias")
        if not -100 <= bias <= 100:
            raise invalid("`logit_bias` values must be between -100 and 100.", param="logit_bias")


def _check_stream_options(value: Any) -> None:
    if not isinstance(value, dict):
        raise _wrong("stream_options", "an object")
    if not isinstance(value.get("include_usage") or False, bool):
        raise _wrong("stream_options.include_usage", "a boolean")


def _check_tools(value: Any) -> None:
    if not isinstance(value, list):
        raise _wrong("tools", "a list")
    if len(value) > MAX_TOOLS:
        raise invalid(f"`tools` takes up to {MAX_TOOLS} tools.", param="tools")
    for index, tool in enumerate(value):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type", "function") != "function":
            raise invalid('A tool must be {"type": "function", "function": {...}}.', param=f"tools[{index}]")
        name = function.get("name")
        if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
            raise invalid(
                "A function's name must be 1 to 128 plain characters.", param=f"tools[{index}].function.name"
            )
        if not isinstance(function.get("parameters") or {}, dict):
            raise _wrong(f"tools[{index}].function.parameters", "a JSON schema")


_SHAPES: dict[str, Callable[[Any], None]] = {
    "stream": _check_flag("stream"),
    "stop": _check_stop,
    "logit_bias": _check_logit_bias,
    "stream_options": _check_stream_options,
    "tools": _check_tools,
}


_UNCHECKED = frozenset(
    {
        "model",
        "messages",
        "prompt",
        "response_format",
        "tool_choice",
        "parallel_tool_calls",
        "logprobs",
        "user",
    }
    | {"metadata", "store", "service_tier", "reasoning_effort", "chat_template_kwargs", "stop_token_ids"}
    | {"repetition_penalty", "ignore_eos", "echo", "allowed_token_ids", "include_reasoning"}
)


@cache
def _known() -> frozenset[str]:
    return _UNCHECKED | NUMBERS.keys() | integers(1).keys() | _SHAPES.keys()


def _check_combinations(request: dict[str, Any]) -> None:
    if "stream_options" in request and not request.get("stream"):
        raise invalid("`stream_options` needs `stream: true`.", param="stream_options")
    if "top_logprobs" in request and request.get("logprobs") is not True:
        raise invalid("`top_logprobs` needs `logprobs: true`.", param="top_logprobs")
    if request.get("min_tokens", 0) > request.get("max_completion_tokens", request.get("max_tokens", _INT64)):
        raise invalid("`min_tokens` is larger than the limit of tokens.", param="min_tokens")
    if request.get("allowed_token_ids") == []:
        raise invalid("`allowed_token_ids` leaves no token to choose from.", param="allowed_token_ids")
    if request.get("tools") == []:
        del request["tools"]
    if "tools" not in request and request.get("tool_choice") in ("none", "auto"):
        del request["tool_choice"]
    if "tool_choice" in request and "tools" not in request:
        raise invalid("`tool_choice` needs `tools`.", param="tool_choice")


def _wrong(name: str, what: str) -> GatewayError:
    return invalid(f"`{name}` must be {what}.", param=name)
