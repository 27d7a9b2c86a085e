"""Twenty kinds of schema, greedy and sampled: the answer ends by itself and validates."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import jsonschema_rs
import pytest

from ple_inference.reference.grammar import GrammarBusyError, GrammarCompiler, GrammarError
from ple_inference.reference.vocabulary import Vocabulary


def closed(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


WORD = {"type": "string", "maxLength": 8}
PQ = {"enum": ["p", "q"]}
DIGITS = {"type": "integer", "minimum": -50, "maximum": 50}
SCHEMAS: dict[str, Any] = {
    "boolean": closed(a={"type": "boolean"}),
    "null": closed(a={"type": "null"}),
    "integer with bounds": closed(a=DIGITS),
    "integer without a sign": closed(a={"type": "integer", "minimum": 0, "maximum": 9999}),
    "number with bounds": closed(a={"type": "number", "minimum": 0, "maximum": 1}),
    "number with open bounds": closed(a={"type": "number", "exclusiveMinimum": 2, "exclusiveMaximum": 3}),
    "string of a length": closed(a={"type": "string", "minLength": 2, "maxLength": 6}),
    "pattern": closed(a={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}),
    "pattern of choices": closed(a={"type": "string", "pattern": "^(red|green|blue)$"}),
    "date": closed(a={"type": "string", "format": "date"}),
    "enum of strings": closed(a={"enum": ["x", "y y", "z\"z"]}),
    "enum of kinds": closed(a={"enum": [1, None, True, "1"]}),
    "constant": closed(a={"const": "fixed"}),
    "array of integers": closed(a={"type": "array", "items": DIGITS, "minItems": 1, "maxItems": 4}),
    "array of enums": closed(a={"type": "array", "items": PQ, "minItems": 2, "maxItems": 2}),
    "array of objects": closed(a={"type": "array", "items": closed(b=DIGITS, c=WORD), "maxItems": 2}),
    "tuple": closed(a={"type": "array", "prefixItems": [DIGITS, WORD], "items": False, "minItems": 2}),
    "nested objects": closed(a=closed(b=closed(c=closed(d=DIGITS)))),
    "union": closed(a={"anyOf": [DIGITS, closed(b={"type": "boolean"}), {"type": "null"}]}),
    "optional members": {**closed(a=DIGITS, b={"type": "boolean"}), "required": ["a"]},
    "reference": {**closed(a={"$ref": "#/$defs/point"}), "$defs": {"point": closed(x=DIGITS, y=DIGITS)}},
    "array at the root": {"type": "array", "items": DIGITS, "minItems": 1, "maxItems": 3},
}  # fmt: skip


@pytest.fixture(scope="module")
def http(server: Any) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


@pytest.mark.parametrize("kind", SCHEMAS)
def test_answers_meet_their_schema(http: httpx.Client, kind: str) -> None:
    response_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMAS[kind]}}
    for sampling in ({"temperature": 0}, {"seed": 1}):
        body = {"messages": [{"role": "user", "content": kind}], "max_tokens": 300, **sampling}
        answer = http.post("/v1/chat/completions", json={**body, "response_format": response_format})
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        assert choice["finish_reason"] == "stop", choice
        jsonschema_rs.validate(SCHEMAS[kind], json.loads(choice["message"]["content"]))


def test_json_object_begins_one_and_ends_as_length_or_whole(http: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 60, "temperature": 0}
    answer = http.post("/v1/chat/completions", json={**body, "response_format": {"type": "json_object"}})
    (choice,) = answer.json()["choices"]
    assert choice["message"]["content"].startswith("{")
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(choice["message"]["content"]), dict)


def test_grammar_binds_after_the_thoughts(http: httpx.Client) -> None:
    schema = closed(a={"enum": ["x", "y"]})
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 60,
        "temperature": 0,
        "chat_template_kwargs": {"enable_thinking": True},
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        # Ends the thoughts at once; the grammar outweighs it afterwards.
        "logit_bias": {"509": 100},
    }
    (choice,) = http.post("/v1/chat/completions", json=body).json()["choices"]
    assert choice["finish_reason"] == "stop"
    assert json.loads(choice["message"]["content"])["a"] in ("x", "y")
    assert choice["message"]["reasoning"] == ""


def test_a_grammar_that_waits_for_others_is_not_blamed(tiny_checkpoint: Path) -> None:
    vocabulary = Vocabulary(tiny_checkpoint)
    compiler = GrammarCompiler(vocabulary, 512, frozenset({511}), deadline_s=0.2)
    release = threading.Event()

    def slow() -> Any:
        release.wait(30)

    async def ask() -> list[BaseException | Any]:
        slow_ones = [compiler._compile(slow, None) for _ in range(2)]
        return await asyncio.gather(*slow_ones, compiler.any_object(), return_exceptions=True)

    try:
        *blamed, innocent = asyncio.run(ask())
    finally:
        release.set()
        compiler.close()
    assert [type(error) for error in blamed] == [GrammarError, GrammarError]
    assert isinstance(innocent, GrammarBusyError)
