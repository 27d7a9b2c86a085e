"""What the gateway says of itself in OpenAPI: every route, what each takes, and how each may answer.

Objects are open: fields that are not named here reach the engine as they are.
"""

from typing import Any

from ple_gateway import __version__
from ple_gateway.parameters import MAX_STOPS, MAX_TOOLS, NUMBERS, integers

Spec = dict[str, Any]

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string", "minLength": 1},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string", "minLength": 1}},
        },
    },
}
_HEALTH = {
    "type": "object",
    "required": ["state", "reasons", "since", "dependencies"],
    "properties": {
        "state": {"enum": ["starting", "ready", "degraded", "stopping"]},
        "reasons": {"type": "array", "items": {"type": "string"}},
        "since": {"type": "string"},
        "dependencies": {"type": "object"},
    },
}
_MODEL = {"type": "object", "required": ["id"], "properties": {"id": {"type": "string"}}}
_MODELS = {
    "type": "object",
    "required": ["object", "data"],
    "properties": {"object": {"const": "list"}, "data": {"type": "array", "items": _MODEL}},
}
_ANSWER = {
    "type": "object",
    "required": ["choices"],
    "properties": {"choices": {"type": "array", "items": {"type": "object"}}},
}
_EVENT = {"type": "object", "required": ["data"], "properties": {"data": {"type": "string"}}}
_PART = {
    "type": "object",
    "required": ["type"],
    "properties": {
        "type": {"enum": ["text", "image_url"]},
        "text": {"type": "string"},
        "image_url": {
            "type": "object",
            "required": ["url"],
            "properties": {"url": {"type": "string", "description": "a data URL"}},
        },
    },
}
_MESSAGE = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}, {"type": "null"}]},
        "tool_calls": {"type": ["array", "null"], "items": {"type": "object"}},
        "tool_call_id": {"type": ["string", "null"]},
        "reasoning_content": {"type": ["string", "null"]},
    },
}
_TOOL = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": {"type": "string", "pattern": "^[a-zA-Z0-9_.:-]{1,128}$"},
                "description": {"type": "string"},
                "parameters": {"type": "object"},
            },
        },
    },
}
_RESPONSE_FORMAT = {
    "type": "object",
    "required": ["type"],
    "properties": {
        "type": {"enum": ["text", "json_object", "json_schema"]},
        "json_schema": {
            "type": "object",
            "required": ["name", "schema"],
            "properties": {
                "name": {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,64}$"},
                "schema": {"type": "object"},
                "strict": {"type": ["boolean", "null"]},
            },
        },
    },
}
_RESPONSE = {
    "type": "object",
    "required": ["id", "object", "status", "output"],
    "properties": {"object": {"const": "response"}, "output": {"type": "array", "items": {"type": "object"}}},
}
_RESPONSES_BODY = {
    "input": {"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": {"type": "object"}}]},
    "instructions": {"type": ["string", "null"]},
    "max_output_tokens": {"type": ["integer", "null"], "minimum": 1},
    "stream": {"type": ["boolean", "null"]},
}
_ANTHROPIC_MESSAGE = {
    "type": "object",
    "required": ["id", "type", "role", "content", "stop_reason", "usage"],
    "properties": {"type": {"const": "message"}, "content": {"type": "array", "items": {"type": "object"}}},
}
_BLOCKS = {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}]}
_MESSAGES_BODY = {
    "messages": {
        "type": "array",
        "minItems": 1,
        "items": {
            "type": "object",
            "required": ["role", "content"],
            "properties": {"role": {"enum": ["user", "assistant"]}, "content": _BLOCKS},
        },
    },
    "system": {"type": ["string", "null"]},
    "max_tokens": {"type": ["integer", "null"], "minimum": 1},
    "stop_sequences": {"type": "array", "maxItems": MAX_STOPS, "items": {"type": "string", "minLength": 1}},
    "stream": {"type": ["boolean", "null"]},
}


def openapi_document(max_choices: int) -> Spec:
    """Return the document; a test holds it against the routes that are served."""
    chat = {"messages": {"type": "array", "minItems": 1, "items": _MESSAGE}}
    prompt = {
        "prompt": {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "minItems": 1, "items": {"type": "string"}},
                {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
            ]
        }
    }
    tools = {"tools": {"type": "array", "maxItems": MAX_TOOLS, "items": _TOOL}}
    sampling = _sampling(max_choices)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Triplex gateway", "version": __version__},
        "components": {
            "schemas": {"Error": _ERROR, "AnthropicError": _ANTHROPIC_ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "paths": {
            "/v1/chat/completions": _post({**chat, **sampling, **tools}, ["messages"], streams=True),
            "/v1/completions": _post({**prompt, **sampling}, ["prompt"], streams=True),
            "/v1/responses": _post(_RESPONSES_BODY, ["input"], answer=_RESPONSE),
            "/v1/messages": _post(
                _MESSAGES_BODY, ["messages"], answer=_ANTHROPIC_MESSAGE, error="AnthropicError"
            ),
            "/v1/messages/count_tokens": _post(
                _MESSAGES_BODY, ["messages"], streams=False, error="AnthropicError"
            ),
            "/tokenize": _post({**chat, **prompt}, [], streams=False),
            "/v1/models": _get(_MODELS, 503),
            "/v1/models/{model}": {
                **_get(_MODEL, 404, 503),
                "parameters": [
                    {
                        "name": "model",
                        "in": "path",
                        "required": True,
                        "schema": {"type": "string", "minLength": 1},
                    }
                ],
            },
            "/livez": _get(_HEALTH),
            "/readyz": _get(_HEALTH, health=True),
            "/health": _get(_HEALTH, health=True),
            "/metrics": {"get": {"responses": {"200": _content("text/plain", {"type": "string"})}}},
            "/": {"get": {"responses": {"200": _content("text/html", {"type": "string"})}}},
            "/status.json": _get({"type": "object"}),
            "/openapi.json": _get({"type": "object", "required": ["openapi", "paths"]}),
        },
    }


def _sampling(max_choices: int) -> Spec:
    numbers = {
        name: {"type": ["number", "null"], "minimum": low, "maximum": high}
        for name, (low, high) in NUMBERS.items()
    }
    whole = {
        name: {"type": ["integer", "null"], "minimum": low, "maximum": high}
        for name, (low, high) in integers(max_choices).items()
        if name != "top_logprobs"  # only beside logprobs
    }
    stop = {"type": "string", "minLength": 1}
    return {
        **numbers,
        **whole,
        "model": {"type": ["string", "null"], "maxLength": 0, "description": "empty: the engine's"},
        "stream": {"type": ["boolean", "null"]},
        "stop": {"anyOf": [stop, {"type": "array", "items": stop, "maxItems": MAX_STOPS}, {"type": "null"}]},
        "logprobs": {"type": ["boolean", "null"]},
        "user": {"type": ["string", "null"]},
        "response_format": _RESPONSE_FORMAT,
    }


def _post(
    properties: Spec,
    required: list[str],
    *,
    streams: bool = True,
    answer: Spec = _ANSWER,
    error: str = "Error",
) -> Spec:
    body = {"type": "object", "properties": properties, "required": required}
    good: Spec = _content("application/json", answer if streams else {"type": "object"})
    if streams:
        good["content"]["text/event-stream"] = {"schema": _EVENT}
    return {
        "post": {
            "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
            "responses": {
                "200": good,
                **_errors(400, 404, 408, 409, 413, 415, 429, 500, 502, 503, 504, schema=error),
            },
            "security": [{"key": []}],
        }
    }


def _get(schema: Spec, *errors: int, health: bool = False) -> Spec:
    responses = {"200": _content("application/json", schema), **_errors(*errors)}
    if health:
        responses["503"] = responses["200"]
    return {"get": {"responses": responses}}


def _errors(*statuses: int, schema: str = "Error") -> Spec:
    reference = {"$ref": f"#/components/schemas/{schema}"}
    return {str(status): _content("application/json", reference) for status in (401, *statuses)}


def _content(media_type: str, schema: Spec) -> Spec:
    return {"description": "", "content": {media_type: {"schema": schema}}}
