"""The official OpenAI client is content with the gateway."""

import openai
import pytest
from fake_engine import USAGE, answer, chunk, complete, message


@pytest.fixture
def client(gateway):
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="unused", max_retries=0, timeout=10) as client:
        yield client


ASK = {"model": "triplex-tiny", "messages": [{"role": "user", "content": "hi"}]}


def test_chat(client, engine):
    engine.script = complete("hello")
    answered = client.chat.completions.create(**ASK)
    assert answered.choices[0].message.content == "hello"
    assert answered.usage.total_tokens == USAGE["total_tokens"]
    assert answered._request_id


def test_stream_with_usage(client, engine):
    engine.script = complete("hel", "lo\u2028")
    chunks = list(client.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "hello\u2028"
    assert chunks[-1].usage.completion_tokens == USAGE["completion_tokens"]


def test_tool_calls_stream(client, engine):
    pieces = ['{"city": ', '"Köln"}']

    def script(call):
        call.open_stream()
        call.event(
            chunk(
                {
                    "tool_calls": [
                        {
                            "index": 0,
                            "id": "c1",
                            "type": "function",
                            "function": {"name": "w", "arguments": ""},
                        }
                    ]
                }
            )
        )
        for piece in pieces:
            call.event(chunk({"tool_calls": [{"index": 0, "function": {"arguments": piece}}]}))
        call.event(chunk({}, "tool_calls"))
        call.event(b"[DONE]")
        call.end_stream()

    engine.script = script
    tool = {"type": "function", "function": {"name": "w", "parameters": {"type": "object"}}}
    with client.chat.completions.stream(**ASK, tools=[tool]) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.tool_calls[0].function.arguments == "".join(pieces)


def test_errors_have_their_classes(client, engine):
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="nope", messages=ASK["messages"])
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(**ASK, temperature=9)
    engine.script = answer(503, b"")
    with pytest.raises(openai.InternalServerError):
        client.chat.completions.create(**ASK)
    engine.script = answer(429, {"message": "slow"})
    with pytest.raises(openai.RateLimitError):
        client.chat.completions.create(**ASK)


def test_failure_in_a_stream_is_raised(client, engine):
    def script(call):
        call.open_stream()
        call.event(chunk({"content": "some"}))
        call.reset()

    engine.script = script
    with pytest.raises(openai.APIError):
        list(client.chat.completions.create(**ASK, stream=True))


def test_parsed_answers(client, engine):
    engine.script = answer(200, message('{"name": "Ada"}'))
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}},
        "required": ["name"],
        "additionalProperties": False,
    }
    answered = client.chat.completions.create(
        **ASK,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "p", "schema": schema, "strict": True},
        },
    )
    assert answered.choices[0].message.content == '{"name": "Ada"}'


def test_models(client):
    assert [model.id for model in client.models.list()] == ["triplex-tiny"]
    assert client.models.retrieve("triplex-tiny").id == "triplex-tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_keys(start_gateway):
    gateway = start_gateway(api_keys="good,better")
    for key, error in (("good", None), ("better", None), ("bad", openai.AuthenticationError)):
        with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0) as client:
            if error:
                with pytest.raises(error) as caught:
                    client.models.list()
                assert caught.value.code == "invalid_api_key"
            else:
                assert client.models.list()
