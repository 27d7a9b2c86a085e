"""Keywords of one schema node: which belong together, in today's spelling, and free of contradictions."""

import math
from typing import Any

from ple_gateway.schema_merging import ANNOTATIONS, Node
from ple_gateway.schema_patterns import fits_grammars
from ple_gateway.schema_rules import refused

FORMATS = frozenset(
    {"email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid", "uri",
     "uri-reference", "uri-template", "json-pointer", "relative-json-pointer"}
)  # fmt: skip
FAMILIES = {
    "object": {
        "properties", "required", "additionalProperties", "patternProperties", "propertyNames",
        "minProperties", "maxProperties",
    },
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
}  # fmt: skip
_BOUNDS = (
    ("minLength", "maxLength"), ("minimum", "maximum"), ("minItems", "maxItems"),
    ("minProperties", "maxProperties"),
)  # fmt: skip
_NAME_KEYWORDS = frozenset({"type", "enum", "const", "minLength", "maxLength", "pattern"})


def modern(node: Node) -> Node:
    """Write keywords of drafts 4 to 7 in today's way."""
    node = dict(node)
    if isinstance(node.get("items"), list):
        node["prefixItems"] = node.pop("items")
        node["items"] = node.pop("additionalItems", True)
    node.pop("additionalItems", None)
    for exclusive, inclusive in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(node.get(exclusive), bool) and node.pop(exclusive) and inclusive in node:
            node[exclusive] = node.pop(inclusive)
    return node


def name_type(node: Node) -> None:
    """Give a node a type that its keywords are about, else compilers pass over them; drop other keywords."""
    if {"enum", "$ref", "anyOf", "oneOf", "allOf"} & set(node):
        return
    about = [name for name, keywords in FAMILIES.items() if keywords & set(node)]
    if about:
        node.setdefault("type", about[0])
    named = types(node) | ({"number"} if "integer" in types(node) else set())
    for name in about:
        if name not in named:
            for keyword in FAMILIES[name]:
                node.pop(keyword, None)


def check_bounds(node: Node, pointer: str) -> None:
    """Raise GatewayError 400 where a lower bound is above its upper bound."""
    for least, most in _BOUNDS:
        if node.get(least, -math.inf) > node.get(most, math.inf):
            raise refused(f"`{least}` at {pointer or '/'} is above `{most}`.")


def is_empty_range(node: Node, *, whole: bool) -> bool:
    """Whether no number, or no whole one, is within the bounds."""
    low, above = node.get("minimum", -math.inf), node.get("exclusiveMinimum", -math.inf)
    high, below = node.get("maximum", math.inf), node.get("exclusiveMaximum", math.inf)
    if whole:
        return bool(max(low, above + 1) > min(high, below - 1))
    return bool(low > high or low >= below or above >= high or above >= below)


def types(node: Node) -> set[str]:
    """The types that a node names."""
    kind = node.get("type", ())
    return {kind} if isinstance(kind, str) else set(kind)


def is_plain_name_rule(node: Node, names: Any) -> bool:
    """Whether vLLM leaves a `propertyNames` to xgrammar, and xgrammar follows it."""
    if not isinstance(names, dict) or not set(names) - ANNOTATIONS <= _NAME_KEYWORDS:
        return False
    if {"properties", "patternProperties"} & set(node) or names.get("type", "string") != "string":
        return False
    if "pattern" not in names:
        return True
    return fits_grammars(names["pattern"]) and not {"minLength", "maxLength"} & set(names)
