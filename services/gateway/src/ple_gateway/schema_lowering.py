"""A schema as grammar compilers can follow it: what they refuse or pass over is rewritten or left out.

Aimed at xgrammar 0.2.8 and at vLLM 0.33's own list of what keeps a schema from it, so that none goes to a
compiler that knows less. What is left out widens what the engine may say: the finished answer is validated
against the schema as the client sent it. References stay as they are.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ple_gateway.schema_keywords import (
    FAMILIES,
    FORMATS,
    check_bounds,
    is_empty_range,
    is_plain_name_rule,
    modern,
    name_type,
    types,
)
from ple_gateway.schema_merging import ANNOTATIONS, DeadEndError, Merger, Node
from ple_gateway.schema_patterns import anchored, fits_grammars
from ple_gateway.schema_rules import child_pointer, finds, refused, resolve, walk
from ple_gateway.schema_validator import compile_validator

_UNKNOWN = (
    "not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies", "uniqueItems",
    "contains", "minContains", "maxContains", "multipleOf", "unevaluatedProperties", "unevaluatedItems",
    "$dynamicRef", "$recursiveRef", "contentEncoding", "contentMediaType", "contentSchema",
)  # fmt: skip
_INT64 = 2**63
_MERGES = 200
_MAX_SPREAD = 32  # alternatives that what stands beside them is copied into
_MAX_STEPS = 16


@dataclass
class Lowered:
    """The schema for the engine, and the pointers of what it does not say any more."""

    schema: Node
    lost: list[str] = field(default_factory=list)


def lower(schema: Node) -> Lowered:
    """Rewrite a schema that passed `check_size`; raises GatewayError for one that no text can satisfy."""
    lowered = _Lowering(schema)
    result = lowered.node(schema, "")
    assert isinstance(result, dict)
    for _, node, _ in walk(result):
        if isinstance(node.get("$ref"), str):
            _check_reference(node["$ref"], schema, result)
    return Lowered(result, sorted(set(lowered.lost)))


def _check_reference(reference: str, before: Node, after: Node) -> None:
    seen: set[str] = set()
    target: Any = {"$ref": reference}
    while isinstance(target, dict) and isinstance(target.get("$ref"), str):
        step = target["$ref"]
        if step in seen:
            raise refused(f"`$ref` {reference[:200]!r} leads in a circle.")
        seen.add(step)
        target = resolve(after, step)
        if target is False or (finds(before, step) and not finds(after, step)):
            raise refused(f"`$ref` {reference[:200]!r} leads to what grammars cannot express.")


class _Lowering:
    def __init__(self, root: Node) -> None:
        self._merger = Merger(root, _MERGES)
        self.lost: list[str] = []

    def node(self, node: Any, pointer: str) -> Any:
        """Lower one schema and all inside it; a boolean stays."""
        if not isinstance(node, dict):
            return node
        node = self._composed(modern(node), pointer)
        if set(node) - ANNOTATIONS == {"$ref"}:
            if isinstance(node["$ref"], str) and node["$ref"][1:2] not in ("", "/"):
                self.lost.append(f"{pointer}/$ref")  # an anchor: taken, and not followed
            return {**node, **self._stored(node, pointer)}
        if "oneOf" in node and not self._merger.exclude_each_other(node["oneOf"]):
            self.lost.append(f"{pointer}/oneOf")  # at least one of them is what binds
        for keyword in _UNKNOWN:
            if keyword in node and not (keyword.startswith("unevaluated") and node[keyword] is not False):
                self._lose(node, pointer, keyword)
            node.pop(keyword, None)
        self._values(node, pointer)
        name_type(node)
        check_bounds(node, pointer)
        self._string(node, pointer)
        self._number(node, pointer)
        self._object(node, pointer)
        self._array(node, pointer)
        return {**node, **self._stored(node, pointer), **self._children(node, pointer)}

    def _lose(self, node: Node, pointer: str, *keywords: str) -> None:
        for keyword in keywords:
            if keyword in node:
                del node[keyword]
                self.lost.append(child_pointer(pointer, keyword))

    def _stored(self, node: Node, pointer: str) -> Node:
        """Definitions."""
        return {
            keyword: {
                name: self.node(part, f"{pointer}/{keyword}/{name}") for name, part in node[keyword].items()
            }
            for keyword in ("$defs", "definitions")
            if isinstance(node.get(keyword), dict)
        }

    def _children(self, node: Node, pointer: str) -> Node:
        below: Node = {}
        for keyword in ("properties", "patternProperties"):
            if keyword in node:
                below[keyword] = {
                    name: self.node(part, child_pointer(f"{pointer}/{keyword}", name))
                    for name, part in node[keyword].items()
                }
        for keyword in ("prefixItems", "anyOf", "oneOf", "allOf"):
            if keyword in node:
                below[keyword] = [
                    self.node(part, f"{pointer}/{keyword}/{index}")
                    for index, part in enumerate(node[keyword])
                ]
        for keyword in ("items", "additionalProperties"):
            if keyword in node:
                below[keyword] = self.node(node[keyword], f"{pointer}/{keyword}")
        return below

    # Compilers look at the first of $ref, enum, alternatives and type that they find; at nothing beside it.

    def _composed(self, node: Node, pointer: str) -> Node:
        """Bring a node to where only one of these stands in it, without a conjunction."""
        for _ in range(_MAX_STEPS):
            stored = {key: value for key, value in node.items() if key in ANNOTATIONS}
            rest = {key: value for key, value in node.items() if key not in ANNOTATIONS}
            changed = self._step(rest, pointer)
            if changed is None:
                return node
            node = {**{key: value for key, value in changed.items() if key not in ANNOTATIONS}, **stored}
        self.lost.append(pointer or "/")
        return stored

    def _step(self, rest: Node, pointer: str) -> Node | None:
        """One step of `_composed`; None when there is nothing left to do."""
        if "$ref" in rest and len(rest) > 1:
            beside = {key: value for key, value in rest.items() if key != "$ref"}
            return self._conjunction(
                [{"$ref": rest["$ref"]}, beside], {"$ref": rest["$ref"]}, pointer, beside
            )
        if "allOf" in rest:
            beside = {key: value for key, value in rest.items() if key != "allOf"}
            parts = [*rest["allOf"], *([beside] if beside else [])]
            first = parts[0] if isinstance(parts[0], dict) else {}
            return self._conjunction(parts, beside or first, pointer, ["allOf"])
        for keyword in ("anyOf", "oneOf"):
            if keyword in rest:
                return self._alternatives(rest, keyword, pointer)
        return None

    def _conjunction(self, parts: list[Any], kept: Node, pointer: str, lost: Iterable[str]) -> Node:
        try:
            merged = self._merger.merged(parts)
        except DeadEndError as exc:
            raise refused(f"the parts at {pointer or '/'} contradict each other.") from exc
        if merged is None:
            self.lost += [child_pointer(pointer, keyword) for keyword in lost]
            return kept
        return merged

    def _alternatives(self, rest: Node, keyword: str, pointer: str) -> Node | None:
        """Copy what stands beside alternatives into each; drop those that nothing can satisfy."""
        alive = [branch for branch in rest[keyword] if branch is not False]
        if not alive:
            raise refused(f"no alternative of `{keyword}` at {pointer or '/'} can be satisfied.")
        beside = {key: value for key, value in rest.items() if key != keyword}
        if not beside:
            return {keyword: alive} if len(alive) < len(rest[keyword]) else None
        spread = self._spread(alive, beside) if len(alive) <= _MAX_SPREAD else None
        if spread == []:
            raise refused(f"no alternative of `{keyword}` at {pointer or '/'} can be satisfied.")
        if spread is None:
            self.lost.append(f"{pointer}/{keyword}")
            return beside
        return {keyword: spread}

    def _spread(self, branches: list[Any], beside: Node) -> list[Node] | None:
        spread = []
        for branch in branches:
            try:
                merged = self._merger.merged([beside, branch])
            except DeadEndError:
                continue
            if merged is None:
                return None
            spread.append(merged)
        return spread

    def _values(self, node: Node, pointer: str) -> None:
        """Keep the values of `enum` and `const` that the rest of the node admits: only they are looked at."""
        if "enum" not in node and "const" not in node:
            return
        rest = {
            key: value
            for key, value in node.items()
            if key not in ANNOTATIONS and key not in {"enum", "const"}
        }
        values = [node["const"]] if "const" in node else node["enum"]
        if "const" in node and "enum" in node:
            values = [value for value in values if value in node["enum"]]
        if rest and not _refers(rest):
            admits = compile_validator(rest)
            values = [value for value in values if admits.is_valid(value)]
        if not values:
            raise refused(
                f"no value of `enum` or `const` at {pointer or '/'} satisfies what stands beside it."
            )
        for keyword in [*rest, "const", "enum"]:
            node.pop(keyword, None)
        node["enum"] = values

    def _string(self, node: Node, pointer: str) -> None:
        pattern = node.get("pattern")
        if isinstance(pattern, str):
            if not fits_grammars(pattern):
                self._lose(node, pointer, "pattern")
            else:
                node["pattern"] = anchored(pattern)
        if node.get("format") not in FORMATS or "pattern" in node:
            self._lose(node, pointer, "format")
        if "pattern" in node or "format" in node:
            self._lose(node, pointer, "minLength", "maxLength")

    def _number(self, node: Node, pointer: str) -> None:
        kinds = types(node)
        for keyword in FAMILIES["number"]:
            bound = node.get(keyword)
            if bound is None:
                continue
            if not -_INT64 <= bound < _INT64:
                self._lose(node, pointer, keyword)
            elif "integer" in kinds and bound != int(bound):
                del node[keyword]
                is_lower = keyword.endswith("inimum")
                inclusive = "minimum" if is_lower else "maximum"
                whole = math.ceil(bound) if is_lower else math.floor(bound)
                node[inclusive] = (max if is_lower else min)(whole, node.get(inclusive, whole))
        if is_empty_range(node, whole="integer" in kinds and "number" not in kinds):
            raise refused(f"no number is within the bounds at {pointer or '/'}.")

    def _object(self, node: Node, pointer: str) -> None:
        if "object" not in types(node):
            return
        self._required(node, pointer)
        self._pattern_properties(node, pointer)
        names = node.get("propertyNames", True)
        if names is True:
            node.pop("propertyNames", None)
        elif not is_plain_name_rule(node, names):
            self._lose(node, pointer, "propertyNames")
        self._property_counts(node, pointer)

    def _required(self, node: Node, pointer: str) -> None:
        """Declare what is required, else no compiler would require it; drop what can never be there."""
        properties = dict(node.get("properties", {}))
        others = node.get("additionalProperties", True)
        for name in node.get("required", ()):
            properties.setdefault(name, True if "patternProperties" in node else others)
            if properties[name] is False:
                raise refused(f"the object at {pointer or '/'} requires {name[:100]!r} and rules it out.")
        properties = {name: part for name, part in properties.items() if part is not False}
        if properties or "properties" in node:
            node["properties"] = properties

    def _pattern_properties(self, node: Node, pointer: str) -> None:
        """One pattern, and no properties beside it, is what vLLM leaves to xgrammar."""
        patterns = node.get("patternProperties", {})
        good = [name for name, part in patterns.items() if part is not False and fits_grammars(name)]
        if not patterns:
            node.pop("patternProperties", None)
        elif not good or "properties" in node:
            self._lose(node, pointer, "patternProperties")
        else:
            self.lost += [
                child_pointer(f"{pointer}/patternProperties", name) for name in patterns if name != good[0]
            ]
            node["patternProperties"] = {anchored(good[0]): patterns[good[0]]}

    def _property_counts(self, node: Node, pointer: str) -> None:
        least = node.get("minProperties", 0)
        if node.get("maxProperties", math.inf) < len(set(node.get("required", ()))):
            raise refused(f"the object at {pointer or '/'} requires more properties than `maxProperties`.")
        if least <= len(node.get("properties", {})) or "patternProperties" in node:
            return
        if node.get("additionalProperties") is False:
            raise refused(f"the object at {pointer or '/'} cannot have `minProperties` {least}.")
        node.setdefault("additionalProperties", True)

    def _array(self, node: Node, pointer: str) -> None:
        if "array" not in types(node):
            return
        most = node.get("maxItems", math.inf)
        if "prefixItems" in node:
            kept = node["prefixItems"][: most if most != math.inf else None]
            node["prefixItems"] = [{} if part is True else part for part in kept]
            if False in node["prefixItems"]:
                node["prefixItems"] = node["prefixItems"][: node["prefixItems"].index(False)]
                node["items"] = False
        if "prefixItems" not in node or node.get("minItems", 0) > len(node["prefixItems"]):
            node.setdefault("items", True)  # left out, it closes the array
        if node.get("items") is False and node.get("minItems", 0) > len(node.get("prefixItems", ())):
            raise refused(f"the array at {pointer or '/'} cannot have `minItems` {node['minItems']}.")


def _refers(node: Any) -> bool:
    return any("$ref" in inner or "$dynamicRef" in inner for _, inner, _ in walk(node))
