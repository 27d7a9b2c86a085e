"""What a JSON schema may ask for: size caps, remote references, `strict`, and recursion that never ends."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ple_gateway.errors import GatewayError, invalid

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SINGLES = (
    "items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains",
    "propertyNames", "unevaluatedProperties", "unevaluatedItems",
)  # fmt: skip

# Grammar compilers silently skip these or enforce them wrongly, so `strict` cannot be promised.
_NOT_STRICT = (
    "not", "if", "then", "else", "oneOf", "dependentRequired", "dependentSchemas", "dependencies",
    "patternProperties", "propertyNames", "unevaluatedProperties", "unevaluatedItems", "uniqueItems",
    "contains", "minContains", "maxContains", "minProperties", "maxProperties", "$dynamicRef",
    "$recursiveRef", "contentEncoding", "contentMediaType", "contentSchema",
)  # fmt: skip
_NOT_STRICT_PATTERN = re.compile(r"\(\?[=!<]|\\[bB1-9]|\\k<")  # lookaround, word borders, back references


@dataclass(frozen=True)
class SchemaLimits:
    """Sizes past which compiling a grammar takes too long."""

    bytes: int
    depth: int
    enum_values: int
    branches: int


def refused(message: str) -> GatewayError:
    """Return the 400 for a schema."""
    return invalid(
        f"Invalid schema for response_format: {message}", param="response_format", code="invalid_json_schema"
    )


def check_size(schema: Any, limits: SchemaLimits) -> None:
    """Raise GatewayError for a schema that is too deep, lists too much or branches too often."""
    enum_values = 0
    for pointer, node, depth in walk(schema):
        if depth > limits.depth:
            raise refused(f"it is nested deeper than {limits.depth} levels.")
        values = node.get("enum")
        enum_values += len(values) if isinstance(values, list) else 0
        if enum_values > limits.enum_values:
            raise refused(f"its enums hold more than {limits.enum_values} values.")
        reference = node.get("$ref")
        if isinstance(reference, str) and not reference.startswith("#"):
            raise refused(f"`$ref` at {pointer or '/'} points outside the schema, which is never fetched.")
    if _Branches(schema).count(schema) > limits.branches:
        raise refused(f"it has more than {limits.branches} combinations of branches.")


def check_strict(schema: dict[str, Any]) -> None:
    """Raise GatewayError naming the first keyword and place that `strict: true` rules out."""
    if schema.get("type") != "object":
        raise refused("with strict: true the root must have `type: object`.")
    for pointer, node, _ in walk(schema):
        for keyword in _NOT_STRICT:
            if keyword in node:
                raise refused(f"`{keyword}` at {pointer or '/'} is not supported with strict: true.")
        if len(node.get("allOf", ())) > 1:
            raise refused(
                f"`allOf` of several schemas at {pointer or '/'} is not supported with strict: true."
            )
        if _NOT_STRICT_PATTERN.search(str(node.get("pattern", ""))):
            raise refused(
                f"`pattern` at {pointer or '/'} uses lookaround, word borders or back references, which are "
                "not supported with strict: true."
            )
        if "properties" in node or node.get("type") == "object":
            _check_closed(pointer or "/", node)


def _check_closed(pointer: str, node: dict[str, Any]) -> None:
    if node.get("additionalProperties") is not False:
        raise refused(f"with strict: true the object at {pointer} needs `additionalProperties: false`.")
    for name in node.get("properties", {}):
        if name not in node.get("required", ()):
            raise refused(
                f"with strict: true `required` at {pointer} must list every property; {name!r} is missing."
            )


def check_recursion(schema: Any) -> None:
    """Raise GatewayError when no finite text can satisfy the schema, as `{"$ref": "#"}` cannot be."""
    finite: set[int] = set()
    nodes = [node for _, node, _ in walk(schema)]
    grown = True
    while grown:
        new = {id(node) for node in nodes if id(node) not in finite and _ends(node, schema, finite)}
        finite |= new
        grown = bool(new)
    if isinstance(schema, dict) and id(schema) not in finite:
        raise refused("it refers to itself without an end, so that no finite answer can satisfy it.")


def _ends(node: dict[str, Any], root: Any, finite: set[int]) -> bool:
    def known(part: Any) -> bool:
        return id(part) in finite if isinstance(part, dict) else part is not False

    if isinstance(node.get("$ref"), str) and not known(resolve(root, node["$ref"])):
        return False
    for keyword in ("anyOf", "oneOf"):
        if keyword in node and not any(known(part) for part in node[keyword]):
            return False
    if not all(known(part) for part in node.get("allOf", ())):
        return False
    properties = node.get("properties", {})
    if not all(known(properties.get(name, True)) for name in node.get("required", ())):
        return False
    return not node.get("minItems") or isinstance(node.get("items"), list) or known(node.get("items", True))


def resolve(root: Any, reference: str) -> Any:
    """Follow a local JSON pointer; True, which allows everything, for what is not found that way."""
    node = root
    for part in reference.removeprefix("#").split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, list) and name.isdigit() and int(name) < len(node):
            node = node[int(name)]
        elif isinstance(node, dict) and name in node:
            node = node[name]
        else:
            return True
    return node


def walk(schema: Any) -> Iterator[tuple[str, dict[str, Any], int]]:
    """Yield (JSON pointer, node, depth) of every object schema, the outer before the inner."""
    pending = [("", schema, 1)]
    while pending:
        pointer, node, depth = pending.pop()
        if isinstance(node, dict):
            yield pointer, node, depth
            pending.extend((f"{pointer}/{part}", child, depth + 1) for part, child in _children(node))


def _children(node: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for keyword in _MAPS:
        children = node.get(keyword)
        if isinstance(children, dict):
            for name, child in children.items():
                yield f"{keyword}/{name.replace('~', '~0').replace('/', '~1')}", child
    for keyword in _LISTS:
        children = node.get(keyword)
        if isinstance(children, list):
            for index, child in enumerate(children):
                yield f"{keyword}/{index}", child
    for keyword in _SINGLES:
        if isinstance(node.get(keyword), dict):
            yield keyword, node[keyword]


class _Branches:
    """Counts the alternatives that a grammar expands to; a definition counts wherever it is referred to."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._counts: dict[int, int] = {}

    def count(self, node: Any) -> int:
        if not isinstance(node, dict):
            return 1
        if id(node) not in self._counts:
            self._counts[id(node)] = 1  # what a cycle sees
            below = [
                self.count(child)
                for part, child in _children(node)
                if not part.startswith(("$defs", "definitions"))
            ]
            if isinstance(node.get("$ref"), str):
                below.append(self.count(resolve(self._root, node["$ref"])))
            self._counts[id(node)] = max(1, sum(below))
        return self._counts[id(node)]
