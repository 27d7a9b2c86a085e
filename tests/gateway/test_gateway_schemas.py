"""Structured output: what is refused before the engine, and what never leaves as a success."""

import json

import pytest
from fake_engine import answer, complete, message, wait_for

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
GOOD = '{"name": "Ada", "age": 36}'


def formatted(schema, *, strict=False, name="person"):
    return {"type": "json_schema", "json_schema": {"name": name, "schema": schema, "strict": strict}}


def with_property(schema):
    return {**PERSON, "properties": {"name": schema, "age": {"type": "integer"}}}


def chain(length, *, backwards=False, wrap=False):
    """A schema whose definitions refer to one another in a row of `length`."""
    order = range(length, -1, -1) if backwards else range(length + 1)
    links = [{"$ref": f"#/$defs/d{i + 1}"} for i in range(length)] + [{"type": "integer"}]
    if wrap:
        links = [{"type": "array", "items": link, "minItems": 1} for link in links]
    return {"$ref": "#/$defs/d0", "$defs": {f"d{i}": links[i] for i in order}}


def test_good_answers_pass(gateway, engine):
    engine.script = complete(GOOD[:9], GOOD[9:])
    assert gateway.chat(response_format=formatted(PERSON, strict=True)).status == 200
    assert gateway.chat(response_format=formatted(PERSON), stream=True).text == GOOD
    assert engine.calls[-1].request["response_format"] == formatted(PERSON)


def test_bad_answer_is_asked_for_once_more_then_fails(gateway, engine):
    answers = iter([message('{"name": 1}'), message(GOOD)])
    engine.script = lambda call: call.answer(200, next(answers))
    assert gateway.chat(response_format=formatted(PERSON)).json["choices"][0]["message"]["content"] == GOOD
    engine.script = answer(200, message('{"name": "secret words", "age": 151}'))
    failed = gateway.chat(response_format=formatted(PERSON))
    assert (failed.status, failed.error["code"]) == (502, "schema_violation")
    assert "/age" in failed.error["message"]
    assert "secret" not in failed.error["message"]
    assert len(engine.calls) == 4
    assert gateway.metric("answers_rejected_total", reason="schema_violation") == 3


@pytest.mark.parametrize("text", ['{"name": "x"}', "no json", GOOD + GOOD, "[]", "{" * 5000])
def test_streamed_bad_answer_ends_in_an_error_frame(gateway, engine, text):
    engine.script = complete(text)
    events = gateway.chat(response_format=formatted(PERSON), stream=True).events
    assert events[-2]["error"]["code"] == "schema_violation"
    assert events[-1] == "[DONE]"
    assert all(event["choices"][0]["finish_reason"] is None for event in events[:-2])
    wait_for(
        lambda: gateway.metric("answers_rejected_total", reason="schema_violation") == 1, "it is counted"
    )


def test_cut_answers_pass_as_they_are(gateway, engine):
    engine.script = complete('{"name": "A', finish="length")
    assert gateway.chat(response_format=formatted(PERSON)).status == 200
    events = gateway.chat(response_format=formatted(PERSON), stream=True).events
    assert events[-2]["choices"][0]["finish_reason"] == "length"


def test_json_object(gateway, engine):
    engine.script = complete('{"a": 1}')
    assert gateway.chat(response_format={"type": "json_object"}).status == 200
    engine.script = complete("[1]")
    assert gateway.chat(response_format={"type": "json_object"}).error["code"] == "schema_violation"
    engine.script = complete("anything")
    assert gateway.chat(response_format={"type": "text"}).status == 200


@pytest.mark.parametrize(
    "response_format",
    [
        "json",
        {},
        {"type": "xml"},
        {"type": "json_schema"},
        {"type": "json_schema", "schema": PERSON},
        {"type": "json_schema", "json_schema": {"schema": PERSON}},
        formatted(PERSON, name="a b"),
        formatted(PERSON, name="x" * 65),
        formatted(None),
        formatted([]),
        formatted(PERSON, strict="yes"),
        formatted({"type": "objekt"}),
        formatted({"type": "string", "minLength": -1}),
        formatted({"type": "string", "pattern": "("}),
        formatted({"enum": "x"}),
        formatted({"$ref": "#/$defs/none"}),
        formatted({"$ref": "http://127.0.0.1:9/x.json"}),
        formatted({"$ref": "file:///etc/passwd"}),
        formatted({"$schema": "http://example.org/own", "type": "object"}),
        formatted({"$ref": "#"}),
        formatted({"$id": "http://example.org/", "$ref": "other.json"}),
        formatted({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
        formatted({"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}),
        formatted(chain(8000)),
        formatted(chain(8000, backwards=True)),
        formatted(chain(3000, wrap=True)),
        formatted({"type": "object", "properties": {f"p{i}": {} for i in range(501)}}),
        formatted({"enum": ["x" * 10_001]}),
        formatted({"const": {"a": ["x" * 10_001]}}),
        formatted({"type": "string", "pattern": ".{0,1001}"}),
        formatted({"type": "string", "pattern": "^(a[b\\]]{0,40}){30}$"}),
        formatted({"type": "string", "pattern": "(((a{99}){99}){99}){99}"}),
        formatted({"type": "object", "patternProperties": {"a{99999999999}": {}}}),
    ],
)
def test_bad_formats_are_refused_before_the_engine(gateway, engine, response_format):
    answered = gateway.chat(response_format=response_format)
    assert (answered.status, answered.error["param"]) == (400, "response_format")
    assert not engine.calls


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        (with_property({"type": "array", "uniqueItems": True}), ("uniqueItems", "/properties/name")),
        (with_property({"not": {"type": "string"}}), ("not", "/properties/name")),
        (with_property({"oneOf": [{"type": "string"}]}), ("oneOf", "/properties/name")),
        (with_property({"type": "string", "pattern": "(?=a)b"}), ("pattern", "/properties/name")),
        ({**PERSON, "patternProperties": {"^x": {}}}, ("patternProperties", "at /")),
        ({**PERSON, "additionalProperties": True}, ("additionalProperties", "at /")),
        ({**PERSON, "required": ["name"]}, ("required", "'age'")),
        ({"type": "array", "items": {"type": "string"}}, ("object",)),
        ({**PERSON, "allOf": [{}, {}]}, ("allOf",)),
    ],
)
def test_strict_names_keyword_and_place(gateway, engine, schema, named):
    answered = gateway.chat(response_format=formatted(schema, strict=True))
    assert (answered.status, answered.error["code"]) == (400, "invalid_json_schema")
    assert all(word in answered.error["message"] for word in named)
    assert not engine.calls


def test_without_strict_the_same_keywords_are_only_validated(gateway, engine):
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    engine.script = complete('{"a": [1, 2]}')
    assert gateway.chat(response_format=formatted(schema)).status == 200
    engine.script = complete('{"a": [1, 1]}')
    assert gateway.chat(response_format=formatted(schema)).error["code"] == "schema_violation"


def test_recursion_that_can_end_is_accepted(gateway, engine):
    tree = {
        "type": "object",
        "properties": {"children": {"type": "array", "items": {"$ref": "#"}}},
        "required": ["children"],
    }
    engine.script = complete('{"children": [{"children": []}]}')
    assert gateway.chat(response_format=formatted(tree)).status == 200


def nested(depth):
    schema = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def branching(levels):
    definitions = {str(level): {"anyOf": [{"$ref": f"#/$defs/{level + 1}"}] * 2} for level in range(levels)}
    return {"$defs": {**definitions, str(levels): {"type": "null"}}, "$ref": "#/$defs/0"}


@pytest.mark.parametrize(
    "schema",
    [
        nested(70),
        {"enum": [str(number) for number in range(20_001)]},
        branching(20),
        {"description": "x" * 600_000},
    ],
    ids=["depth", "enum", "branches", "bytes"],
)
def test_sizes_are_capped(gateway, engine, schema):
    answered = gateway.chat(response_format=formatted(schema))
    assert (answered.status, answered.error["code"]) == (400, "invalid_json_schema")
    assert not engine.calls


def test_backtracking_pattern_is_bounded(gateway, engine):
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(a+)+(?!b)$"}}}
    engine.script = complete(json.dumps({"a": "a" * 5000 + "!"}))
    assert gateway.chat(response_format=formatted(schema)).status == 502


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#number", "$defs": {"a": {"$anchor": "number", "type": "integer"}}},
        {"$ref": "#/$defs/a%20b", "$defs": {"a b": {"type": "integer"}}},
        chain(200),
        chain(100, backwards=True),
        {"type": "integer", "$comment": "x" * 20_000},
        {"anyOf": [{"type": "integer"}, {"type": "string", "pattern": r"^[\w.{}()-]{1,64}@(\[|\(){0,3}$"}]},
    ],
)
def test_unusual_but_good_schemas_pass(gateway, engine, schema):
    engine.script = complete("7")
    assert gateway.chat(response_format=formatted(schema)).status == 200
