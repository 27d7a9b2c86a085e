"""Structured output: schemas are checked before the engine sees them, answers before the client does."""

import asyncio
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NoReturn

import jsonschema_rs
import msgspec

from ple_gateway import schema_rules
from ple_gateway.errors import GatewayError, invalid
from ple_gateway.schema_rules import SchemaLimits, refused

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_BACKTRACK_LIMIT = 100_000
_CACHED_SCHEMAS = 64


class AnswerSchema:
    """What a finished answer has to be; safe to share between requests."""

    def __init__(self, find_fault: Callable[[Any], str | None]) -> None:
        self._find_fault = find_fault

    async def check_answer(self, text: str) -> None:
        """Raise GatewayError 502 `schema_violation` unless `text` is what was asked for."""
        fault = await asyncio.to_thread(self._fault_of, text)
        if fault:
            raise GatewayError(
                502,
                f"The engine's answer does not satisfy response_format: {fault}",
                code="schema_violation",
                may_retry=False,
            )

    def _fault_of(self, text: str) -> str | None:
        try:
            answer = msgspec.json.decode(text.encode("utf-8", "replace"))
        except (msgspec.DecodeError, RecursionError):
            return "it is not one JSON value."
        return self._find_fault(answer)


async def answer_schema(response_format: Any, limits: SchemaLimits) -> AnswerSchema | None:
    """Return the check for a request's `response_format`; raises GatewayError 400 naming what is wrong."""
    if response_format is None:
        return None
    if not isinstance(response_format, dict):
        raise invalid("`response_format` must be an object.", param="response_format")
    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return AnswerSchema(lambda answer: None if isinstance(answer, dict) else "it is no JSON object.")
    if kind != "json_schema":
        raise invalid(
            "`response_format.type` must be text, json_object or json_schema.", param="response_format"
        )
    schema, strict = _schema_of(response_format.get("json_schema"))
    encoded = msgspec.json.encode(schema)
    if len(encoded) > limits.bytes:
        raise refused(f"it is larger than {limits.bytes} bytes.")
    return await asyncio.to_thread(_compiled, encoded, strict, limits)


def _schema_of(json_schema: Any) -> tuple[Any, bool]:
    if not isinstance(json_schema, dict):
        raise invalid(
            "`response_format.json_schema` must be an object with `name` and `schema`.",
            param="response_format",
        )
    name = json_schema.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise invalid(
            "`response_format.json_schema.name` must be 1 to 64 letters, digits, `_` or `-`.",
            param="response_format",
        )
    strict = json_schema.get("strict") or False
    if not isinstance(strict, bool):
        raise invalid("`response_format.json_schema.strict` must be a boolean.", param="response_format")
    schema = json_schema.get("schema")
    if not isinstance(schema, dict):
        raise invalid("`response_format.json_schema.schema` must be an object.", param="response_format")
    return schema, strict


@lru_cache(maxsize=_CACHED_SCHEMAS)
def _compiled(encoded: bytes, strict: bool, limits: SchemaLimits) -> AnswerSchema:
    """Check and compile a schema given as JSON; raises GatewayError."""
    schema = msgspec.json.decode(encoded)
    schema_rules.check_size(schema, limits)
    validator = _validator(schema)
    if strict:
        schema_rules.check_strict(schema)
    schema_rules.check_recursion(schema)

    def find_fault(answer: Any) -> str | None:
        try:
            validator.validate(answer)
        except jsonschema_rs.ValidationError as error:
            # The keyword and the place only: the message would quote the answer.
            keyword = error.schema_path[-1] if error.schema_path else "schema"
            return f"`{keyword}` fails at {_pointer(error.instance_path)}."
        return None

    return AnswerSchema(find_fault)


def _validator(schema: dict[str, Any]) -> Any:
    """Compile; patterns run in linear time, those that cannot are bounded in their backtracking."""
    linear = jsonschema_rs.RegexOptions()
    bounded = jsonschema_rs.FancyRegexOptions(backtrack_limit=_BACKTRACK_LIMIT)
    try:
        return jsonschema_rs.validator_for(schema, retriever=_never_fetch, pattern_options=linear)
    except jsonschema_rs.ValidationError:
        pass
    try:
        return jsonschema_rs.validator_for(schema, retriever=_never_fetch, pattern_options=bounded)
    except jsonschema_rs.ValidationError as error:
        raise refused(f"{error.message[:500]} (at {_pointer(error.instance_path)})") from error


def _never_fetch(_uri: str) -> NoReturn:
    raise ValueError("references outside the schema are never fetched")


def _pointer(path: list[str | int]) -> str:
    return "/" + "/".join(str(part) for part in path)
