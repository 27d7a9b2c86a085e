"""What a JSON schema may ask for: size caps, remote references, `strict`, and recursion that never ends."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from ple_gateway.errors import GatewayError, invalid
from ple_gateway.schema_patterns import fits_grammars, written_out_chars

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

# A level of a nested definition takes a property, a reference and an alternative.
_DEPTH_BY_REFERENCES = 4
_MAX_BOUNDED_LEVELS = 3
_NOWHERE = object()


@dataclass(frozen=True)
class SchemaLimits:
    """Sizes past which compiling a grammar takes too long."""

    bytes: int
    depth: int
    enum_values: int
    branches: int
    properties: int
    string_chars: int
    pattern_chars: int


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
        _check_node_size(node, pointer or "/", limits)
    branches, depth = _measure(schema)
    if branches > limits.branches:
        raise refused(f"it has more than {limits.branches} combinations of branches.")
    if depth > limits.depth * _DEPTH_BY_REFERENCES:
        raise refused(
            f"it is nested deeper than {limits.depth * _DEPTH_BY_REFERENCES} levels, references followed."
        )


def _check_node_size(node: dict[str, Any], pointer: str, limits: SchemaLimits) -> None:
    """Raise GatewayError for what takes grammar compilers a time that grows with its square."""
    properties = node.get("properties")
    if isinstance(properties, dict) and len(properties) > limits.properties:
        raise refused(f"the object at {pointer} has more than {limits.properties} properties.")
    values = node.get("enum")
    literals = [*(values if isinstance(values, list) else []), node.get("const")]
    if any(_longest_string(literal) > limits.string_chars for literal in literals):
        raise refused(f"a string in `enum` or `const` at {pointer} is longer than {limits.string_chars}.")
    patterns = [node.get("pattern"), *_keys(node.get("patternProperties"))]
    if any(isinstance(p, str) and written_out_chars(p) > limits.pattern_chars for p in patterns):
        raise refused(
            f"`pattern` at {pointer} is longer than {limits.pattern_chars} with its repetitions written out."
        )


def _longest_string(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    inner = value if isinstance(value, list) else [*value, *value.values()] if isinstance(value, dict) else []
    return max(map(_longest_string, inner), default=0)


def _keys(value: Any) -> list[Any]:
    return [*value] if isinstance(value, dict) else []


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
        if isinstance(node.get("pattern"), str) and not fits_grammars(node["pattern"]):
            raise refused(
                f"`pattern` at {pointer or '/'} uses what grammars cannot follow (such as lookaround, word "
                "borders, back references, Unicode classes), which is not supported with strict: true."
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


def slow_places(schema: dict[str, Any]) -> tuple[str, ...]:
    """Pointers of bounded arrays in bounded arrays, through whose grammars engines have crawled.

    Raises GatewayError for more than _MAX_BOUNDED_LEVELS of them.
    """
    slow = []
    pending: list[tuple[str, Any, int]] = [("", schema, 0)]
    while pending:
        pointer, node, levels = pending.pop()
        if not isinstance(node, dict):
            continue
        if "maxItems" in node or node.get("minItems", 0) > 1:
            levels += 1
            if levels > _MAX_BOUNDED_LEVELS:
                raise refused(f"bounded arrays are nested more than {_MAX_BOUNDED_LEVELS} deep at {pointer}.")
            if levels > 1:
                slow.append(pointer)
        pending.extend((f"{pointer}/{part}", child, levels) for part, child in _children(node))
    return tuple(sorted(slow))


def check_recursion(schema: Any) -> None:
    """Raise GatewayError when no finite text can satisfy the schema, as `{"$ref": "#"}` cannot be."""
    nodes = [node for _, node, _ in walk(schema)]
    waiting: dict[int, list[dict[str, Any]]] = {}  # who may end once that node does
    for node in nodes:
        for part in _parts(node, schema):
            waiting.setdefault(id(part), []).append(node)
    finite: set[int] = set()
    pending = {id(node): node for node in reversed(nodes)}  # in order, none twice; the inner first
    while pending:
        node = pending.pop(next(iter(pending)))
        if id(node) not in finite and _ends(node, schema, finite):
            finite.add(id(node))
            pending |= {id(above): above for above in waiting.get(id(node), ())}
    if isinstance(schema, dict) and id(schema) not in finite:
        raise refused("it refers to itself without an end, so that no finite answer can satisfy it.")


def _parts(node: dict[str, Any], root: Any) -> Iterator[dict[str, Any]]:
    """Yield the schemas that `_ends` asks about."""
    for _, child in _children(node):
        if isinstance(child, dict):
            yield child
    if isinstance(node.get("$ref"), str):
        target = resolve(root, node["$ref"])
        if isinstance(target, dict):
            yield target


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
    found = _found(root, reference)
    return True if found is _NOWHERE else found


def finds(root: Any, reference: str) -> bool:
    """Whether a local JSON pointer leads anywhere."""
    return _found(root, reference) is not _NOWHERE


def child_pointer(pointer: str, name: str) -> str:
    """Return the JSON pointer of a member."""
    return f"{pointer}/{name.replace('~', '~0').replace('/', '~1')}"


def _found(root: Any, reference: str) -> Any:
    if reference[1:2] not in ("", "/"):
        return _NOWHERE  # an anchor
    node = root
    for part in unquote(reference).removeprefix("#").split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, list) and name.isdecimal() and len(name) < 10 and int(name) < len(node):
            node = node[int(name)]
        elif isinstance(node, dict) and name in node:
            node = node[name]
        else:
            return _NOWHERE
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
                yield child_pointer(keyword, name), child
    for keyword in _LISTS:
        children = node.get(keyword)
        if isinstance(children, list):
            for index, child in enumerate(children):
                yield f"{keyword}/{index}", child
    for keyword in _SINGLES:
        if isinstance(node.get(keyword), dict):
            yield keyword, node[keyword]


def _measure(root: Any) -> tuple[int, int]:
    """Return how many alternatives a grammar expands to, and how deep: references are followed.

    A definition counts wherever it is referred to. Without recursion, since clients choose the depth.
    """
    sizes: dict[int, tuple[int, int]] = {}
    pending = [(root, False)]
    while pending:
        node, parts_are_known = pending.pop()
        parts = [part for part in _expanded(node, root) if isinstance(part, dict)]
        if parts_are_known:
            below = [sizes[id(part)] for part in parts]
            branches = sum(count for count, _ in below) + len(_expanded(node, root)) - len(parts)
            sizes[id(node)] = max(1, branches), 1 + max((depth for _, depth in below), default=0)
        elif id(node) not in sizes:
            sizes[id(node)] = 1, 1  # what a cycle sees
            pending.append((node, True))
            pending.extend((part, False) for part in parts if id(part) not in sizes)
    return sizes[id(root)]


def _expanded(node: dict[str, Any], root: Any) -> list[Any]:
    """List the schemas that a grammar writes out in the place of `node`."""
    below = [child for part, child in _children(node) if not part.startswith(("$defs", "definitions"))]
    if isinstance(node.get("$ref"), str):
        below.append(resolve(root, node["$ref"]))
    return below
