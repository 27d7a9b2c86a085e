"""The validator: jsonschema-rs, which fetches nothing and whose patterns take bounded time."""

from typing import Any, NoReturn

import jsonschema_rs

from ple_gateway.schema_rules import refused

_BACKTRACK_LIMIT = 100_000


def compile_validator(schema: Any) -> Any:
    """Compile; patterns run in linear time, those that cannot are bounded in their backtracking.

    Raises GatewayError 400 for what is no schema.
    """
    linear = jsonschema_rs.RegexOptions()
    bounded = jsonschema_rs.FancyRegexOptions(backtrack_limit=_BACKTRACK_LIMIT)
    try:
        return jsonschema_rs.validator_for(schema, retriever=_never_fetch, pattern_options=linear)
    except jsonschema_rs.ValidationError:
        pass
    try:
        return jsonschema_rs.validator_for(schema, retriever=_never_fetch, pattern_options=bounded)
    except jsonschema_rs.ValidationError as error:
        raise refused(f"{error.message[:500]} (at {pointer_of(error.instance_path)})") from error


def _never_fetch(_uri: str) -> NoReturn:
    raise ValueError("references outside the schema are never fetched")


def pointer_of(path: list[str | int]) -> str:
    """Write a path as a JSON pointer."""
    return "/" + "/".join(str(part) for part in path)
