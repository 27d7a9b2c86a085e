"""Structured output: what is refused before the engine, and what never leaves as a success."""

import json
import time

import pytest
from fake_engine import answer, chunk, complete, message, wait_for
from hypothesis import given, settings
from hypothesis import strategies as st

from ple_gateway.blanks import BlankWatch

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
GOOD = '{"name": "Ada", "age": 36}'


TEXT = {"type": "string"}
INTEGER = {"type": "integer"}


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


def as_sent(engine):
    return engine.calls[-1].request["response_format"]["json_schema"]["schema"]


def lowered(answered):
    return answered.headers.get("x-triplex-schema-lowered", "").split("; ")


BROKEN = [
    {"type": "frob"},
    {"pattern": "("},
    {"$ref": "#"},
    {"allOf": [{"$ref": "#"}]},
    {"minLength": 3, "maxLength": 2},
]


@pytest.mark.parametrize("schema", BROKEN)
def test_g16_g17_a_bad_schema_is_a_400_with_a_reason_and_the_next_request_works(gateway, engine, schema):
    nested = {"type": "object", "properties": {"deep": schema}}
    for refused in (schema, nested if "$ref" not in str(schema) else schema):
        answered = gateway.chat(response_format=formatted(refused))
        assert (answered.status, answered.error["code"]) == (400, "invalid_json_schema")
        assert len(answered.error["message"]) > 60
    assert not engine.calls
    engine.script = complete(GOOD)
    assert gateway.chat(response_format=formatted(PERSON)).status == 200


@pytest.mark.parametrize(
    ("part", "lost", "sent", "bad"),
    [
        ({"type": "string", "pattern": "^a+$", "maxLength": 3}, ["maxLength"], {"pattern": "^a+$"}, "aaaa"),
        ({"type": "string", "format": "uuid", "minLength": 40}, ["minLength"], {"format": "uuid"}, "short"),
        ({"type": "string", "format": "own"}, ["format"], {}, 1),
        ({"type": "string", "pattern": "(?=ab)a"}, ["pattern"], {}, "xy"),
        ({"type": "string", "pattern": r"^\p{L}+$"}, ["pattern"], {}, "1"),
        ({"type": "integer", "multipleOf": 3}, ["multipleOf"], {}, 4),
        ({"type": "array", "items": {}, "uniqueItems": True}, ["uniqueItems"], {"items": {}}, [1, 1]),
        ({"type": "string", "not": {"const": "x"}}, ["not"], {}, "x"),
    ],
)  # fmt: skip
def test_g18_g20_what_grammars_cannot_follow_is_left_out_named_and_validated(
    gateway, engine, part, lost, sent, bad
):
    schema = {"type": "object", "properties": {"a": part}, "required": ["a"], "additionalProperties": False}
    engine.script = answer(200, message(json.dumps({"a": bad})))
    refused = gateway.chat(response_format=formatted(schema))
    assert (refused.status, refused.error["code"]) == (502, "schema_violation")
    assert lowered(refused) == [f"/properties/a/{keyword}" for keyword in lost]
    assert as_sent(engine)["properties"]["a"] == {"type": part["type"], **sent}


def test_g18_format_and_length_in_a_stream(gateway, engine):
    schema = {"type": "object", "properties": {"a": {"type": "string", "format": "email", "maxLength": 9}}}
    engine.script = complete('{"a": "somebody@example.org"}')
    streamed = gateway.chat(response_format=formatted(schema), stream=True)
    assert lowered(streamed) == ["/properties/a/maxLength"]
    assert streamed.events[-2]["error"]["code"] == "schema_violation"


def test_g20_strict_refuses_what_is_left_out_otherwise(gateway, engine):
    for pattern in ("(?!a)b", r"\p{L}", r"\bx"):
        answered = gateway.chat(
            response_format=formatted(with_property({"type": "string", "pattern": pattern}), strict=True)
        )
        assert answered.status == 400
        assert "/properties/name" in answered.error["message"]
    assert not engine.calls


def test_header_of_lost_places_is_bounded_and_plain(gateway, engine):
    names = ["é; x\r\ny: z", *(f"that property number {n}" for n in range(200))]
    schema = {"type": "object", "properties": {name: {"type": "string", "not": {}} for name in names}}
    engine.script = complete("{}")
    header = gateway.chat(response_format=formatted(schema)).headers["x-triplex-schema-lowered"]
    assert len(header) < 1000
    assert header.isascii()
    assert "more" in header
    schema["properties"] = {names[0]: {"type": "string", "not": {}}}
    header = gateway.chat(response_format=formatted(schema)).headers["x-triplex-schema-lowered"]
    assert header == "/properties/%C3%A9%3B%20x%0D%0Ay:%20z/not"


@pytest.mark.parametrize(
    ("schema", "sent"),
    [
        (  # inheritance as OpenAPI writes it
            {
                "allOf": [{"$ref": "#/$defs/base"}, {"properties": {"b": INTEGER}, "required": ["b"]}],
                "$defs": {"base": {"type": "object", "properties": {"a": TEXT}, "required": ["a"]}},
            },
            {"type": "object", "properties": {"a": TEXT, "b": INTEGER}, "required": ["a", "b"]},
        ),
        (  # alternatives beside what all of them share
            {
                "type": "object",
                "properties": {"a": TEXT, "b": TEXT},
                "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
            },
            {
                "anyOf": [
                    {"type": "object", "properties": {"a": TEXT, "b": TEXT}, "required": [n]}
                    for n in ("a", "b")
                ]
            },
        ),
        (  # draft 7 tuples, draft 4 bounds
            {
                "$schema": "http://json-schema.org/draft-04/schema#",
                "type": "array",
                "items": [{"type": "number", "minimum": 0, "exclusiveMinimum": True}],
                "additionalItems": False,
            },
            {"type": "array", "prefixItems": [{"type": "number", "exclusiveMinimum": 0}], "items": False},
        ),
        ({"required": ["x"]}, {"type": "object", "required": ["x"], "properties": {"x": True}}),
        ({"type": "object", "properties": {"a": False}}, {"type": "object", "properties": {}}),
        ({**INTEGER, "minimum": 0.5, "exclusiveMaximum": 7.5}, {**INTEGER, "minimum": 1, "maximum": 7}),
        ({"type": "string", "enum": ["a", 1, "b"]}, {"enum": ["a", "b"]}),
        ({"type": "string", "pattern": "^https://"}, {"type": "string", "pattern": "^https://.*$"}),
        ({"type": "string", "pattern": "[0-9]{5}"}, {"type": "string", "pattern": "[0-9]{5}"}),
        ({"pattern": "^a$"}, {"type": "string", "pattern": "^a$"}),
        ({"$ref": "#/$defs/a%20b", "$defs": {"a b": {"type": "null"}}}, {"$ref": "#/$defs/a%20b"}),
        ({"anyOf": [{"type": "null"}, False]}, {"anyOf": [{"type": "null"}]}),
        ({"minProperties": 1}, {"type": "object", "minProperties": 1, "additionalProperties": True}),
    ],
)  # fmt: skip
def test_what_can_be_said_another_way_is_rewritten_without_a_word(gateway, engine, schema, sent):
    engine.script = answer(200, message("{}", finish="length"))
    answered = gateway.chat(response_format=formatted(schema))
    assert answered.status == 200, answered.body
    assert "x-triplex-schema-lowered" not in answered.headers
    told = {key: value for key, value in as_sent(engine).items() if key not in {"$defs", "$schema"}}
    assert told == sent


def test_g19_g23_endless_blanks_end_a_stream(gateway, engine):
    def script(call):
        call.open_stream()
        call.event(chunk({"role": "assistant", "content": '{"name":'}))
        while True:  # until the gateway closes the connection
            call.event(chunk({"content": " \n"}))

    engine.script = script
    for response_format in (formatted(PERSON), {"type": "json_object"}):
        events = gateway.chat(response_format=response_format, stream=True).events
        assert len(events) < 50
        assert events[-2]["error"]["code"] == "endless_blanks"
        assert events[-1] == "[DONE]"


def test_g23_indentation_and_blanks_in_strings_are_no_runaway(gateway, engine):
    indented = json.dumps({"name": " " * 300 + '\\" ' + "\t" * 90, "age": 3}, indent=16)
    for cut in (1, 7, len(indented)):
        engine.script = complete(*(indented[i : i + cut] for i in range(0, len(indented), cut)))
        assert gateway.chat(response_format=formatted(PERSON), stream=True).text == indented
    engine.script = complete(" " * 500)
    assert gateway.chat(stream=True).text == " " * 500  # nobody asked for JSON


@settings(max_examples=200)
@given(st.lists(st.sampled_from([" ", "\n", '"', "\\", "a", " " * 60, "{"]), max_size=12), st.integers(1, 9))
def test_g23_the_blank_watch_sees_the_same_however_the_text_is_cut(pieces, cut):
    text = "".join(pieces)
    in_string = escaped = False
    run = longest = 0
    for character in text:
        run = 0 if in_string or character not in " \n" else run + 1
        longest = max(longest, run)
        if character == '"' and not escaped:
            in_string = not in_string
        escaped = in_string and character == "\\" and not escaped
    watch = BlankWatch()
    assert any(watch.runs_away(text[i : i + cut]) for i in range(0, len(text), cut)) == (longest > 64)


def test_g21_runaway_schemas_are_stopped(start_gateway, engine):
    gateway = start_gateway(schema_timeout_s=0.3)
    began_s = time.monotonic()
    slow = {"anyOf": [{"type": "string", "pattern": f"({n}|\\w{{1,90}}){{1,10}}"} for n in range(9000)]}
    answered = gateway.chat(response_format=formatted(slow))
    assert (answered.status, answered.error["code"]) == (400, "invalid_json_schema")
    assert "seconds" in answered.error["message"]
    assert gateway.chat(response_format=formatted(branching(20))).status == 400
    assert time.monotonic() - began_s < 5
    large = {"enum": [f"value {n}" for n in range(3000)]}  # large enough for a worker, which is a new one now
    gateway = start_gateway()
    engine.script = complete('"value 7"')
    assert gateway.chat(response_format=formatted(large)).status == 200
    engine.script = complete('"value 9999"')
    assert gateway.chat(response_format=formatted(large)).error["code"] == "schema_violation"
    assert gateway.chat(response_format=formatted({**large, "type": "integer"})).status == 400


def test_g22_bounded_arrays_in_arrays_are_named(gateway, engine):
    row = {"type": "array", "items": {"type": "integer"}, "minItems": 5, "maxItems": 10}
    grid = {"type": "object", "properties": {"grid": {"type": "array", "items": row, "maxItems": 10}}}
    engine.script = complete("{}")
    answered = gateway.chat(response_format=formatted(grid))
    assert answered.headers["x-triplex-schema-slow"] == "/properties/grid/items"
    assert "x-triplex-schema-slow" not in gateway.chat(response_format=formatted(PERSON)).headers
    refused = gateway.chat(response_format=formatted(nested_bounds(5)))
    assert (refused.status, refused.error["code"]) == (400, "invalid_json_schema")


def nested_bounds(levels):
    schema = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema, "minItems": 5, "maxItems": 10}
    return schema


def test_g24_thinking_and_schema_come_apart(gateway, engine):
    """The launcher names a reasoning parser, so that a schema binds the answer only, as this check does."""
    engine.script = answer(200, message(GOOD, reasoning="Ada was {not} 37."))
    told = gateway.chat(response_format=formatted(PERSON)).json["choices"][0]["message"]
    assert (told["content"], told["reasoning_content"]) == (GOOD, "Ada was {not} 37.")

    def script(call):
        call.open_stream()
        for delta in ({"role": "assistant"}, {"reasoning": "let me" + " " * 99}, {"content": GOOD}):
            call.event(chunk(delta))
        call.event(chunk({}, "stop"))
        call.event(b"[DONE]")
        call.end_stream()

    engine.script = script
    assert gateway.chat(response_format=formatted(PERSON), stream=True).text == GOOD
    engine.script = answer(200, message(None, reasoning=GOOD))  # no parser: everything is thinking
    assert gateway.chat(response_format=formatted(PERSON)).error["code"] == "schema_violation"


def test_g27_an_echoed_schema_and_guided_fields_do_not_pass(gateway, engine):
    open_schema = {"type": "object", "properties": {"type": {}, "title": {"type": "string"}}}
    engine.script = complete(json.dumps(open_schema))
    assert gateway.chat(response_format=formatted(open_schema)).error["code"] == "schema_violation"
    for name in ("guided_json", "guided_regex", "guided_choice", "guided_grammar"):
        answered = gateway.chat(**{name: PERSON})
        assert (answered.status, answered.error["param"]) == (400, name)
        assert "response_format" in answered.error["message"]


def test_one_semantic_retry_before_any_data_and_none_in_a_stream(gateway, engine):
    answers = iter([message(""), message(GOOD)])
    engine.script = lambda call: call.answer(200, next(answers))
    assert gateway.chat(response_format=formatted(PERSON)).status == 200
    assert gateway.metric("semantic_retries_total") == 1
    assert engine.calls[0].body == engine.calls[1].body
    engine.script = complete("{}")
    assert gateway.chat(response_format=formatted(PERSON), stream=True).events[-2]["error"]
    assert len(engine.calls) == 3


@pytest.mark.parametrize("name", ["Gr\u00f6\u00dfe", "\u5730\u5740", "My Model", "List`1"])
def test_definitions_may_have_any_name(gateway, engine, name):
    inner = {
        "type": "object",
        "properties": {"n": {"$ref": f"#/$defs/{name}"}},
        "additionalProperties": False,
    }
    schema = {"type": "object", "properties": {"a": {"$ref": f"#/$defs/{name}"}}, "$defs": {name: inner}}
    engine.script = complete('{"a": {"n": {}}}')
    assert gateway.chat(response_format=formatted(schema)).status == 200
    sent = engine.calls[-1].request["response_format"]["json_schema"]["schema"]
    assert sent["properties"]["a"]["$ref"] == f"#/$defs/{name}"
    engine.script = complete('{"a": {"n": 5}}')
    assert gateway.chat(response_format=formatted(schema)).status == 502
