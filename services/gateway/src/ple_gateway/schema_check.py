"""One schema checked and compiled, without asyncio: in a thread if it is small, else in a worker process."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import quote

import jsonschema_rs
import msgspec

from ple_gateway import schema_rules
from ple_gateway.schema_lowering import lower
from ple_gateway.schema_rules import SchemaLimits
from ple_gateway.schema_validator import compile_validator, pointer_of

_CACHED_VALIDATORS = 64
_URL_CHARS = "#%/?:@!$&'()*+,;=~[]"


@dataclass(frozen=True)
class CheckedSchema:
    """What the engine gets, as JSON; pointers of what that does not say any more, and of what may be slow."""

    lowered: bytes
    lost: tuple[str, ...]
    slow: tuple[str, ...]


def check_schema(encoded: bytes, strict: bool, limits: SchemaLimits) -> CheckedSchema:
    """Check a schema given as JSON and make what the engine gets; raises GatewayError 400."""
    schema = msgspec.json.decode(encoded)
    schema_rules.check_size(schema, limits)
    validator_for(encoded)
    if strict:
        schema_rules.check_strict(schema)
    schema_rules.check_recursion(schema)
    lowered = lower(schema)
    return CheckedSchema(
        msgspec.json.encode(lowered.schema), tuple(lowered.lost), schema_rules.slow_places(lowered.schema)
    )


def fault_of_text(text: str, find_fault: Callable[[Any], str | None]) -> str | None:
    """Say why a text is not JSON that `find_fault` has nothing against; None when it is."""
    try:
        answer = msgspec.json.decode(text.encode("utf-8", "replace"))
    except (msgspec.DecodeError, RecursionError):
        return "it is not one JSON value."
    return find_fault(answer)


def fault_of_answer(text: str, encoded: bytes) -> str | None:
    """Say where and why an answer misses a schema that `check_schema` passed; None when it does not."""
    validator = validator_for(encoded)

    def find_fault(answer: Any) -> str | None:
        try:
            validator.validate(answer)
        except jsonschema_rs.ValidationError as error:
            # The keyword and the place only: the message would quote the answer.
            keyword = error.schema_path[-1] if error.schema_path else "schema"
            return f"`{keyword}` fails at {pointer_of(error.instance_path)}."
        return "it is the schema itself." if answer and answer == msgspec.json.decode(encoded) else None

    return fault_of_text(text, find_fault)


@lru_cache(maxsize=_CACHED_VALIDATORS)
def validator_for(encoded: bytes) -> Any:
    """Return the validator of a schema given as JSON; raises GatewayError 400."""
    schema = msgspec.json.decode(encoded)
    for _, node, _ in schema_rules.walk(schema):
        if isinstance(node.get("$ref"), str):
            # Definitions are named in any language; the validator wants references as URLs are written.
            node["$ref"] = quote(node["$ref"], safe=_URL_CHARS)
    return compile_validator(schema)
