"""The official OpenAI client against the gateway, as a user would call it."""

import base64
import io
import json

import jsonschema_rs
import openai
import pytest
from PIL import Image

pytestmark = pytest.mark.e2e

MODEL = "triplex-tiny"
HELLO = [{"role": "user", "content": "Hello! Tell me about n-grams."}]


def test_chat(client):
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=12, temperature=0)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12


def test_stream_with_usage(client):
    options = {"model": MODEL, "messages": HELLO, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**options).choices[0].message.content
    stream = client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole
    assert chunks[-1].usage.completion_tokens == 12
    assert chunks[-1].choices == []
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == [
        "length"
    ]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len({c.id for c in chunks}) == 1


def test_a_stream_without_asking_has_no_usage(client):
    stream = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=3, stream=True)
    chunks = list(stream)
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


def test_the_same_seed_gives_the_same_answer(client):
    def ask(seed: int) -> str:
        answer = client.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=16, temperature=1.0, seed=seed
        )
        return answer.choices[0].message.content

    assert ask(1) == ask(1)
    assert ask(1) != ask(2)


def test_text_completion(client):
    answer = client.completions.create(model=MODEL, prompt="def main():", max_tokens=8, temperature=0)
    assert answer.choices[0].text
    assert answer.usage.completion_tokens == 8


def photo(width_px: int, height_px: int) -> str:
    """A PNG with a gradient, as a data URL."""
    image = Image.linear_gradient("L").resize((width_px, height_px)).convert("RGB")
    buffer = io.BytesIO()
    image.save(buffer, "PNG", compress_level=1)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def test_a_large_photo_is_scaled_and_seen(client):
    """4000 x 3000 becomes at most 2,097,152 px: 1,024 px are one token of the prompt."""
    parts = [
        {"type": "image_url", "image_url": {"url": photo(4000, 3000)}},
        {"type": "text", "text": "What is this?"},
    ]
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": parts}], max_tokens=4, temperature=0
    )
    assert answer.usage.completion_tokens == 4
    # 1664 x 1248 is the largest size with sides in multiples of 32 that fits: 2,028 tokens, and some text.
    assert 2_028 <= answer.usage.prompt_tokens <= 2_028 + 60


def closed(properties: dict, **more) -> dict:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
        **more,
    }


WORD = {"type": "string", "pattern": "^[a-z]{1,8}$"}
SCHEMAS = {
    "boolean": closed({"ok": {"type": "boolean"}}),
    "null": closed({"nothing": {"type": "null"}}),
    "integer_bounds": closed({"n": {"type": "integer", "minimum": 3, "maximum": 17}}),
    "integer_negative": closed({"n": {"type": "integer", "minimum": -5, "maximum": -1}}),
    "number_bounds": closed({"x": {"type": "number", "minimum": 0, "maximum": 1}}),
    "enum_strings": closed({"colour": {"enum": ["red", "green", "blue"]}}),
    "enum_mixed": closed({"value": {"enum": [1, "one", None, True]}}),
    "const": closed({"version": {"const": "v1"}, "ok": {"type": "boolean"}}),
    "pattern_word": closed({"word": WORD}),
    "pattern_plate": closed({"plate": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}}),
    "string_length": closed({"s": {"type": "string", "minLength": 2, "maxLength": 5}}),
    "array_of_enums": closed(
        {"tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 3}}
    ),
    "array_of_integers": closed(
        {
            "xs": {
                "type": "array",
                "items": {"type": "integer", "minimum": 0, "maximum": 9},
                "minItems": 2,
                "maxItems": 4,
            }
        }
    ),
    "array_of_objects": closed(
        {"rows": {"type": "array", "items": closed({"id": {"enum": [1, 2]}}), "minItems": 1, "maxItems": 2}}
    ),
    "nested": closed({"a": closed({"b": closed({"c": {"type": "boolean"}})})}),
    "nested_mixed": closed(
        {
            "name": WORD,
            "address": closed({"city": WORD, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}}),
        }
    ),
    "any_of": closed({"v": {"anyOf": [{"type": "boolean"}, {"enum": ["yes", "no"]}]}}),
    "nullable": closed({"v": {"anyOf": [{"type": "null"}, WORD]}}),
    "reference": closed(
        {"left": {"$ref": "#/$defs/leaf"}, "right": {"$ref": "#/$defs/leaf"}},
        **{"$defs": {"leaf": closed({"on": {"type": "boolean"}})}},
    ),
    "date": closed({"day": {"type": "string", "pattern": "^20[0-9]{2}-0[1-9]-[12][0-9]$"}}),
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_an_answer_follows_its_schema(client, name):
    schema = SCHEMAS[name]
    answer = client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        max_tokens=200,
        temperature=0.7,
        seed=11,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": name, "strict": True, "schema": schema},
        },
    )
    assert answer.choices[0].finish_reason == "stop"
    jsonschema_rs.validator_for(schema).validate(json.loads(answer.choices[0].message.content))


def test_there_are_twenty_kinds_of_schema():
    assert len(SCHEMAS) == 20


def test_a_schema_that_cannot_be_kept_is_refused_by_name(client):
    schema = closed({"a": {"type": "string"}}, **{"not": {"required": ["b"]}})
    with pytest.raises(openai.BadRequestError, match="not") as refused:
        client.chat.completions.create(
            model=MODEL,
            messages=HELLO,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "n", "strict": True, "schema": schema},
            },
        )
    assert refused.value.param == "response_format"
    assert refused.value.type == "invalid_request_error"


def test_an_unknown_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError) as refused:
        client.chat.completions.create(model="gpt-nonsense", messages=HELLO)
    assert refused.value.code == "model_not_found"
    assert refused.value.param == "model"


def test_a_bad_key_is_unauthorized(stack):
    with (
        stack.client(api_key="sk-wrong") as client,
        pytest.raises(openai.AuthenticationError) as refused,
    ):
        client.chat.completions.create(model=MODEL, messages=HELLO)
    assert refused.value.code == "invalid_api_key"


def test_models_are_listed_and_found(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_two_chats_decode_at_once(client, stack):
    """Two streams make progress in turns: neither waits for the other's end."""
    options = {"model": MODEL, "messages": HELLO, "max_tokens": 60, "temperature": 0, "stream": True}
    first, second = (iter(client.chat.completions.create(**options)) for _ in range(2))
    for _ in range(5):
        assert next(first).choices
        assert next(second).choices
    rest = [sum(1 for _ in stream) for stream in (first, second)]
    assert all(count > 40 for count in rest)
