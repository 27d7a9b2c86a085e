"""Several schemas that hold at once, as one schema: grammars know no conjunction."""

from collections.abc import Callable
from typing import Any

from ple_gateway.schema_rules import resolve

Node = dict[str, Any]

# What says nothing about an answer, or only names and stores schemas.
ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly",
     "nullable", "$comment", "$schema", "$id", "$anchor", "$defs", "definitions", "discriminator"}
)  # fmt: skip
_LOWER_BOUNDS = frozenset({"minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"})
_UPPER_BOUNDS = frozenset({"maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"})
_MAX_HOPS = 16


class DeadEndError(Exception):
    """Nothing can satisfy all parts."""


class Merger:
    """Merges within one schema; does so a limited number of times, since each copies what it merges."""

    def __init__(self, root: Node, merges: int) -> None:
        self._root = root
        self._left = merges

    def merged(self, parts: list[Any]) -> Node | None:
        """Return one node that says what all parts say, or None where no single one is known to.

        Raises DeadEndError when nothing can satisfy them all.

        A reference is replaced by a copy of what it refers to, which keeps every reference inside valid.
        """
        result: Node = {}
        for part in parts:
            node = self._followed(part)
            self._left -= 1
            if node is None or self._left < 0 or not _merge_into(result, node):
                return None
        return result

    def exclude_each_other(self, branches: list[Any]) -> bool:
        """Whether no answer can satisfy two of these: by their types, or by the values of one property."""
        if len(branches) < 2:
            return True
        try:
            nodes = [self._followed(branch) for branch in branches]
        except DeadEndError:
            return False
        if any(node is None for node in nodes):
            return False
        return _disjoint([_type_names(node) for node in nodes if node is not None]) or any(
            _disjoint([_tags(node, name) for node in nodes if node is not None])
            for name in (nodes[0] or {}).get("required", ())
        )

    def _followed(self, part: Any) -> Node | None:
        for _ in range(_MAX_HOPS):
            if not isinstance(part, dict):
                if part is False:
                    raise DeadEndError
                return {} if part is True else None
            if "$ref" not in part:
                return dict(part)
            siblings = {key: value for key, value in part.items() if key != "$ref"}
            if set(siblings) - ANNOTATIONS:
                part = {"allOf": [{"$ref": part["$ref"]}], **siblings}
                return part if "allOf" not in siblings else None
            part = resolve(self._root, part["$ref"])
        return None


def _type_names(node: Node) -> list[str] | None:
    kind = node.get("type")
    names = [kind] if isinstance(kind, str) else kind
    return [*names, "integer"] if names and "number" in names else names


def _tags(node: Node, name: str) -> list[str] | None:
    """The values that tell an object apart, as text, if it has to be one and to name them."""
    part = node.get("properties", {}).get(name)
    if node.get("type") != "object" or name not in node.get("required", ()) or not isinstance(part, dict):
        return None
    values = [part["const"]] if "const" in part else part.get("enum")
    return [repr(value) for value in values] if values and all(isinstance(v, str) for v in values) else None


def _disjoint(groups: list[list[str] | None]) -> bool:
    known = [set(group) for group in groups if group]
    return len(known) == len(groups) and len(set().union(*known)) == sum(map(len, known))


def _merge_into(result: Node, node: Node) -> bool:
    """Add what `node` says to `result`; False where both say something that cannot be said at once."""
    _keep_closed(result, node)
    for keyword, value in node.items():
        if keyword not in result:
            result[keyword] = value
        elif keyword not in ANNOTATIONS and result[keyword] != value:
            both = _BOTH.get(keyword)
            joined = both(result[keyword], value) if both else None
            if joined is None:
                return False
            result[keyword] = joined
    return True


def _keep_closed(result: Node, node: Node) -> None:
    """An object that one side closes has that side's properties only."""
    for closed, other in ((dict(result), node), (dict(node), result)):
        if closed.get("additionalProperties") is False and isinstance(other.get("properties"), dict):
            known = closed.get("properties", {})
            other["properties"] = {k: v for k, v in other["properties"].items() if k in known}


def _types(one: Any, other: Any) -> Any:
    names = [{*([value] if isinstance(value, str) else value)} for value in (one, other)]
    for mine, theirs in (names, names[::-1]):
        if "number" in mine:
            mine.update(theirs & {"integer"})
    shared = sorted(names[0] & names[1])
    if {"integer", "number"} <= set(shared):
        shared.remove("integer")
    if not shared:
        raise DeadEndError
    return shared[0] if len(shared) == 1 else shared


def _properties(one: Any, other: Any) -> Any:
    shared = {name: _all_of(one[name], other[name]) for name in one if name in other}
    return {**one, **other, **shared}


def _all_of(one: Any, other: Any) -> Any:
    if one in (True, {}) or one == other:
        return other
    return one if other in (True, {}) else {"allOf": [one, other]}


def _additional(one: Any, other: Any) -> Any:
    return False if one is False or other is False else _all_of(one, other)


def _values(one: Any, other: Any) -> Any:
    shared = [value for value in one if value in other]
    if not shared:
        raise DeadEndError
    return shared


_BOTH: dict[str, Callable[[Any, Any], Any]] = {
    **dict.fromkeys(_LOWER_BOUNDS, max),
    **dict.fromkeys(_UPPER_BOUNDS, min),
    "type": _types,
    "enum": _values,
    "required": lambda one, other: [*one, *(name for name in other if name not in one)],
    "properties": _properties,
    "patternProperties": _properties,
    "additionalProperties": _additional,
    "items": _all_of,
    "allOf": lambda one, other: [*one, *other],
    "uniqueItems": lambda one, other: bool(one or other),
}
