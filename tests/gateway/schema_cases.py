"""Schemas for property tests: every keyword, with the values that break things."""

from typing import Any

from hypothesis import strategies as st

PATTERNS = [
    "^[a-z]+$", "[0-9]{2}", "^https://", r"\.json$", "a|b", "^a|b$", "(?=a)b", "(?!x)y", r"\bword\b",
    r"(a)\1", r"\p{L}+", "^$", "x{0,20}", r"^\d{4}-\d{2}$", "[^\\n]*", r"\w+@\w+", "(?:ab)+", r"^\$", r"\$",
    "^.*$", r"\\d", "^(a|b)$", "[^]a]", "a**", r"a\/b",
]  # fmt: skip
NAMES = st.sampled_from(["a", "b", "c", "name", "x/y", "t~z", "", "é"])
VALUES = st.sampled_from(
    [None, True, False, 0, 1, -3, 2.5, "", "a", "foo", "b", [], [1], {}, {"a": 1}, 2**70]
)
LENGTHS = st.integers(0, 4)
BOUNDS = st.sampled_from([-3, 0, 1, 2.5, 7, 10**6, 2**70, -0.5, 1e300])
TYPES = ["string", "integer", "number", "boolean", "null", "array", "object"]
TYPE_LISTS = st.lists(st.sampled_from(TYPES), min_size=1, max_size=3, unique=True)
REFERENCES = ["#/$defs/one", "#/$defs/two", "#", "#/properties/a", "#/$defs/one/items", "#here"]
FORMATS = ["date", "email", "uuid", "idn-email", "binary", "ipv4", "my-format"]


def _keywords(schemas: st.SearchStrategy[Any]) -> dict[str, st.SearchStrategy[Any]]:
    lists = st.lists(schemas, min_size=1, max_size=3)
    maps = st.dictionaries(NAMES, schemas, max_size=3)
    names = st.lists(NAMES, max_size=2, unique=True)
    return {
        "type": st.one_of(st.sampled_from(TYPES), TYPE_LISTS),
        "enum": st.lists(VALUES, min_size=1, max_size=4, unique_by=repr),
        "const": VALUES,
        "minLength": LENGTHS, "maxLength": LENGTHS, "minItems": LENGTHS, "maxItems": LENGTHS,
        "minProperties": LENGTHS, "maxProperties": LENGTHS, "minContains": LENGTHS, "maxContains": LENGTHS,
        "minimum": BOUNDS, "maximum": BOUNDS, "exclusiveMinimum": BOUNDS, "exclusiveMaximum": BOUNDS,
        "multipleOf": st.sampled_from([1, 2, 0.5]),
        "pattern": st.sampled_from(PATTERNS),
        "format": st.sampled_from(FORMATS),
        "properties": maps,
        "patternProperties": st.dictionaries(st.sampled_from(PATTERNS), schemas, max_size=2),
        "additionalProperties": st.one_of(st.booleans(), schemas),
        "propertyNames": schemas,
        "required": names,
        "dependentRequired": st.dictionaries(NAMES, names, max_size=2),
        "dependentSchemas": maps,
        "items": schemas, "prefixItems": lists, "contains": schemas, "uniqueItems": st.booleans(),
        "anyOf": lists, "oneOf": lists, "allOf": lists,
        "not": schemas, "if": schemas, "then": schemas, "else": schemas,
        "unevaluatedProperties": st.booleans(), "unevaluatedItems": st.booleans(),
        "description": st.just("said"), "default": VALUES,
        "$ref": st.sampled_from(REFERENCES),
    }  # fmt: skip


def _nodes(schemas: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    choices = _keywords(schemas)
    chosen = st.lists(st.sampled_from(sorted(choices)), max_size=4, unique=True)
    return chosen.flatmap(lambda names: st.fixed_dictionaries({name: choices[name] for name in names}))


LEAVES = st.one_of(
    st.booleans(),
    st.just({}),
    st.fixed_dictionaries({"type": st.sampled_from(TYPES)}),
    st.fixed_dictionaries({"$ref": st.just("#/$defs/one")}),
)
NODES = st.recursive(LEAVES, _nodes, max_leaves=8)
SCHEMAS = st.builds(
    lambda root, one, two: {**root, "$defs": {"one": one, "two": {"$anchor": "here", **two}}},
    _nodes(NODES),
    NODES,
    _nodes(LEAVES),
)
