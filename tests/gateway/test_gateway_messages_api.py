"""Anthropic's Messages API, with the official client and beside it."""

import base64
import io
import json
from contextlib import contextmanager

import anthropic
import pytest
from fake_engine import DONE, USAGE, USAGE_CHUNK, answer, chunk, complete, message, once, play
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from ple_gateway.anthropic_messages.events import MessagesEvents
from ple_gateway.anthropic_messages.request import chat_request
from ple_gateway.chunks import Chunk
from ple_gateway.errors import GatewayError
from ple_gateway.messages import Conversation

ASK = {"model": "triplex-tiny", "max_tokens": 50, "messages": [{"role": "user", "content": "hi"}]}
TOOLS = [{"name": "look", "description": "Looks.", "input_schema": {"type": "object", "properties": {}}}]
THINK = {"type": "enabled", "budget_tokens": 1024}


def png(colour="red"):
    buffer = io.BytesIO()
    Image.new("RGB", (40, 40), colour).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


@pytest.fixture
def client(gateway):
    with anthropic.Anthropic(base_url=gateway.url, api_key="unused", max_retries=0, timeout=10) as client:
        yield client


def post(gateway, path="/v1/messages", headers=None, **fields):
    return gateway.request("POST", path, {**ASK, **fields}, headers)


def events_of(answered):
    """Events by name and data, checked for agreeing with each other."""
    found = []
    for block in answered.body.decode().strip().split("\n\n"):
        name, data = block.split("\n", 1)
        parsed = json.loads(data.removeprefix("data: "))
        assert name == f"event: {parsed['type']}"
        found.append(parsed)
    return found


def call_delta(index, call_id=None, name=None, arguments=""):
    function = {"arguments": arguments} | ({"name": name} if name else {})
    return {"index": index, "function": function} | ({"id": call_id, "type": "function"} if call_id else {})


def test_message(client, engine):
    engine.script = complete("hello")
    got = client.messages.create(**ASK, system="Be brief.", extra_body={"temperature": 0.5, "top_k": 3})
    assert got.content[0].text == "hello"
    assert got.stop_reason == "end_turn"
    assert got.id.startswith("msg_")
    assert got.usage.input_tokens + got.usage.cache_read_input_tokens == USAGE["prompt_tokens"]
    assert got.usage.output_tokens == USAGE["completion_tokens"]
    assert got._request_id == engine.calls[-1].headers["x-request-id"]
    sent = engine.calls[-1].request
    assert engine.calls[-1].path == "/v1/chat/completions"
    assert sent["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
    ]
    assert (sent["max_tokens"], sent["temperature"], sent["top_k"]) == (50, 0.5, 3)
    assert sent["chat_template_kwargs"] == {"enable_thinking": False}


def test_stream(client, engine):
    engine.script = complete("hel", "lo\u2028")
    with client.messages.stream(**ASK) as stream:
        assert "".join(stream.text_stream) == "hello\u2028"
        final = stream.get_final_message()
    assert final.stop_reason == "end_turn"
    assert final.usage.output_tokens == USAGE["completion_tokens"]


def test_events_come_in_their_order(gateway, engine):
    engine.script = play(
        chunk({"role": "assistant", "content": ""}, usage={"prompt_tokens": 9, "completion_tokens": 0}),
        chunk({"reasoning": "hm"}),
        chunk({"reasoning": "m"}),
        chunk({"content": "I look."}),
        chunk({"tool_calls": [call_delta(0, "c1", "look", '{"a":')]}),
        chunk({"tool_calls": [call_delta(0, arguments=" 1}"), call_delta(1, "c2", "look")]}),
        chunk({}, "tool_calls"),
        USAGE_CHUNK,
        DONE,
    )
    answered = post(gateway, stream=True, thinking=THINK, tools=TOOLS)
    assert answered.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = events_of(answered)
    assert events[0]["message"]["usage"]["input_tokens"] == 9
    shown = [(event["type"], event.get("index")) for event in events]
    assert shown == [
        ("message_start", None),
        ("content_block_start", 0),
        ("content_block_delta", 0),
        ("content_block_delta", 0),
        ("content_block_delta", 0),  # the signature
        ("content_block_stop", 0),
        ("content_block_start", 1),
        ("content_block_delta", 1),
        ("content_block_stop", 1),
        ("content_block_start", 2),
        ("content_block_delta", 2),
        ("content_block_delta", 2),
        ("content_block_stop", 2),
        ("content_block_start", 3),
        ("content_block_delta", 3),
        ("content_block_stop", 3),
        ("message_delta", None),
        ("message_stop", None),
    ]
    assert [event["delta"]["type"] for event in events[2:5]] == [
        "thinking_delta",
        "thinking_delta",
        "signature_delta",
    ]
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == USAGE["completion_tokens"]
    assert engine.calls[-1].request["stream_options"]["include_usage"] is True


def test_tool_loop(client, engine):
    call = {"id": "toolu_1", "type": "function", "function": {"name": "look", "arguments": '{"at": "x"}'}}
    engine.script = answer(200, message("I look.", "tool_calls", tool_calls=[call], reasoning="hm"))
    first = client.messages.create(**ASK, tools=TOOLS, tool_choice={"type": "any"}, thinking=THINK)
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
    assert first.content[2].input == {"at": "x"}
    assert first.stop_reason == "tool_use"
    assert engine.calls[-1].request["tool_choice"] == "required"
    engine.script = complete("I saw it.")
    result = {
        "type": "tool_result",
        "tool_use_id": "toolu_1",
        "is_error": True,
        "content": [
            {"type": "text", "text": "blurred"},
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": png()}},
        ],
    }
    history = [
        *ASK["messages"],
        {"role": "assistant", "content": [block.model_dump(mode="json") for block in first.content]},
        {"role": "user", "content": [result, {"type": "text", "text": "well?"}]},
    ]
    second = client.messages.create(**{**ASK, "messages": history}, tools=TOOLS, thinking=THINK)
    assert second.content[0].text == "I saw it."
    user, turn, tool, last = engine.calls[-1].request["messages"]
    assert user == {"role": "user", "content": "hi"}
    assert turn["content"] == "I look."
    assert turn["reasoning"] == turn["reasoning_content"] == "hm"
    assert turn["tool_calls"][0]["id"] == "toolu_1"
    assert json.loads(turn["tool_calls"][0]["function"]["arguments"]) == {"at": "x"}
    assert tool == {"role": "tool", "tool_call_id": "toolu_1", "content": "[error]\nblurred"}
    assert [part["type"] for part in last["content"]] == ["image_url", "text"]


def test_thoughts_are_shown_only_when_asked_for(gateway, engine):
    """Much code takes the first block for the text."""
    engine.script = answer(200, message("x", reasoning="hm"))
    assert [block["type"] for block in post(gateway).json["content"]] == ["text"]
    asked = post(gateway, thinking={"type": "adaptive"}, output_config={"effort": "max"})
    assert [block["type"] for block in asked.json["content"]] == ["thinking", "text"]
    assert engine.calls[-1].request["chat_template_kwargs"] == {"enable_thinking": True}
    assert engine.calls[-1].request["reasoning_effort"] == "xhigh"
    engine.script = play(chunk({"reasoning": "hm"}), chunk({"content": "x"}), chunk({}, "stop"), DONE)
    kinds = [
        e["content_block"]["type"] for e in events_of(post(gateway, stream=True)) if "content_block" in e
    ]
    assert kinds == ["text"]


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize(
    ("finish", "stop_reason", "expected"),
    [
        ("stop", None, ("end_turn", None)),
        ("stop", 151645, ("end_turn", None)),
        ("stop", "END", ("stop_sequence", "END")),
        ("length", None, ("max_tokens", None)),
        ("content_filter", None, ("refusal", None)),
    ],
)
def test_stop_reasons(gateway, engine, streamed, finish, stop_reason, expected):
    if streamed:
        end = chunk({}, finish)
        end["choices"][0]["stop_reason"] = stop_reason
        engine.script = play(chunk({"content": "x"}), end, DONE)
        got = events_of(post(gateway, stream=True, stop_sequences=["END"]))[-2]["delta"]
    else:
        body = message("x", finish)
        body["choices"][0]["stop_reason"] = stop_reason
        engine.script = answer(200, body)
        got = post(gateway, stop_sequences=["END"]).json
    assert (got["stop_reason"], got["stop_sequence"]) == expected
    assert engine.calls[-1].request["stop"] == ["END"]


def test_half_a_call_is_not_run(gateway, engine):
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"at": "x'}}
    engine.script = answer(200, message("I look.", "tool_calls", tool_calls=[call]))
    got = post(gateway, tools=TOOLS).json
    assert got["stop_reason"] == "max_tokens"
    assert [block["type"] for block in got["content"]] == ["text"]


def test_fields_without_meaning_here_are_tolerated(gateway, engine):
    cached = {"cache_control": {"type": "ephemeral"}}
    billing = "x-anthropic-billing-header: cc_version=2; cch=1a2b;"
    answered = post(
        gateway,
        system=[{"type": "text", "text": billing}, {"type": "text", "text": "Be brief.", **cached}],
        messages=[{"role": "user", "content": [{"type": "text", "text": "hi", **cached}]}],
        tools=[{**TOOLS[0], **cached, "strict": True, "type": "custom"}],
        metadata={"user_id": "u"},
        service_tier="auto",
        context_management={"edits": []},
        chat_template="{{ 1 }}",
        vendor={"x": 1},
        headers={"anthropic-beta": "a,b"},
    )
    assert answered.status == 200
    sent = engine.calls[-1].request
    assert sent["messages"][0] == {"role": "system", "content": "Be brief."}
    assert set(sent) == {"model", "max_tokens", "messages", "tools", "chat_template_kwargs"}


def test_documents_in_results_of_tools_are_text(gateway, engine):
    document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "Page 1."}}
    result = {"type": "tool_result", "tool_use_id": "x", "is_error": True, "content": [document]}
    assert post(gateway, messages=[{"role": "user", "content": [result]}]).status == 200
    assert engine.calls[-1].request["messages"][-1]["content"] == "[error]\nPage 1."


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"messages": []}, "messages"),
        ({"messages": ["x"]}, "messages[0]"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "smell"}]}]}, "messages[0].content[0]"),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_result", "tool_use_id": "x", "content": [{"type": "smell"}]},
                            {"type": "text", "text": "a"},
                        ],
                    }
                ]
            },
            "messages[0].content[0].content[0]",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_result", "tool_use_id": "x", "content": "y"},
                            {"type": "image", "source": {"type": "base64", "data": "bm8="}},
                        ],
                    }
                ]
            },
            "messages[0].content[1]",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "content[0]"),
        ({"system": 5}, "system"),
        ({"stop_sequences": ["a"] * 5}, "stop_sequences"),
        ({"stop_sequences": "a"}, "stop_sequences"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        ({"tools": [{"name": "a b"}]}, "tools[0]"),
        ({"tools": [{"name": "a", "input_schema": 5}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "maybe"}}, "tool_choice"),
        ({"tool_choice": {"type": ["auto"]}}, "tool_choice"),
        ({"temperature": 9}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
    ],
)
def test_refusals_have_anthropics_shape_and_name_the_place(gateway, engine, fields, named):
    refused = post(gateway, **fields)
    assert refused.status == 400
    assert set(refused.json) == {"type", "error"}
    assert refused.json["type"] == "error"
    assert set(refused.json["error"]) == {"type", "message"}
    assert refused.json["error"]["type"] == "invalid_request_error"
    assert named in refused.json["error"]["message"]
    assert not engine.calls


@pytest.mark.parametrize(
    ("status", "kind", "error"),
    [
        (400, "invalid_request_error", anthropic.BadRequestError),
        (429, "rate_limit_error", anthropic.RateLimitError),
        (500, "api_error", anthropic.InternalServerError),
        (503, "overloaded_error", anthropic.InternalServerError),
        (504, "timeout_error", anthropic.InternalServerError),
    ],
)
def test_errors_of_the_engine(client, engine, status, kind, error):
    engine.script = answer(status, {"error": {"message": "no", "code": status}})
    with pytest.raises(error) as caught:
        client.messages.create(**ASK)
    assert caught.value.body["error"]["type"] == kind
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(**{**ASK, "model": "claude-9"})
    assert missing.value.body["error"]["type"] == "not_found_error"


def test_g50_overflow_is_said_in_the_words_that_clients_look_for(gateway, engine):
    sentence = "This model's maximum context length is 32768 tokens, your request has 40000 input tokens."
    engine.script = answer(400, {"error": {"message": sentence, "param": "input_tokens", "code": 400}})
    for streamed in (True, False):
        refused = post(gateway, stream=streamed).json["error"]
        assert refused["message"] == f"prompt is too long: {sentence}"


def test_failure_in_a_stream_is_an_error_event(client, gateway, engine):
    engine.script = play(chunk({"content": "some"}), lambda call: call.cut())
    events = events_of(post(gateway, stream=True))
    assert events[-1]["type"] == "error"
    assert events[-1]["error"]["type"] == "api_error"
    with pytest.raises(anthropic.APIStatusError):
        list(client.messages.create(**ASK, stream=True))


def test_keys_and_errors_before_any_route(start_gateway):
    gateway = start_gateway(api_keys="good")
    for header in ({"x-api-key": "good"}, {"authorization": "Bearer good"}):
        assert post(gateway, headers=header).status == 200
    for header in ({}, {"x-api-key": "bad"}):
        refused = post(gateway, headers=header)
        assert refused.status == 401
        assert refused.json["error"]["type"] == "authentication_error"
    other = gateway.request("GET", "/v1/models", headers={"x-api-key": "good"})
    assert other.status == 401
    assert other.error["code"] == "invalid_api_key"


def test_waiting_clients_get_pings(start_gateway, engine):
    gateway = start_gateway(commit_delay_s=0.05, keepalive_interval_s=0.05)
    engine.script = once(
        lambda: gateway.metric("keepalive_comments_total") >= 2, "two were sent", complete("x")
    )
    with (
        anthropic.Anthropic(base_url=gateway.url, api_key="unused", max_retries=0, timeout=10) as client,
        client.messages.stream(**ASK) as stream,
    ):
        assert "".join(stream.text_stream) == "x"


def test_structured_output(client, gateway, engine):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    engine.script = answer(200, message('{"a": 1}'))
    form = {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
    assert post(gateway, **form).json["content"][0]["text"] == '{"a": 1}'
    assert engine.calls[-1].request["response_format"]["json_schema"]["schema"] == schema
    engine.script = answer(200, message('{"a": "x"}'))
    assert post(gateway, **form).status == 502


def test_count_tokens(client, engine):
    engine.token_count = 42
    counted = client.messages.count_tokens(
        model="triplex-tiny", messages=ASK["messages"], system="Be brief.", tools=TOOLS
    )
    assert counted.input_tokens == 42
    assert set(engine.tokenized[-1].request) == {"model", "messages", "tools", "chat_template_kwargs"}
    with pytest.raises(anthropic.BadRequestError):
        client.messages.count_tokens(model="triplex-tiny", messages=[])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=10,
)
KINDS = ["text", "image", "document", "tool_use", "tool_result", "thinking", "x"]
BLOCK = st.fixed_dictionaries(
    {"type": st.sampled_from(KINDS)},
    optional=dict.fromkeys(
        ("text", "source", "content", "input", "id", "name", "thinking", "is_error"), JSON
    ),
)
MESSAGE = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant", "system"]),
        "content": st.lists(BLOCK | JSON, max_size=4) | JSON,
    }
)
FIELDS = (
    "system",
    "tools",
    "tool_choice",
    "thinking",
    "stop_sequences",
    "output_config",
    "stream",
    "max_tokens",
)


@settings(max_examples=80)
@given(st.lists(MESSAGE | JSON, max_size=4), st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4))
def test_any_request_is_accepted_or_refused_with_a_400(messages, fields):
    with suppress_400():
        request, origins = chat_request({"messages": messages, **fields})
        assert len(origins) == len(request["messages"])
        Conversation(request["messages"], origins)


@contextmanager
def suppress_400():
    """Anything but a 400 is a failure."""
    try:
        yield
    except GatewayError as error:
        if error.status != 400:
            raise


@given(st.permutations([0, 0, 1, 1, 2, 2, None]))
def test_blocks_never_overlap_whatever_the_order_of_deltas(order):
    """Calls that come interleaved, and text between them, are told one after another, each whole."""
    seen = set()
    says = MessagesEvents(thinking=False)
    frames = b""
    for index in order:
        if index is None:
            delta = {"content": "text"}
        elif index in seen:
            delta = {"tool_calls": [call_delta(index, arguments=f"{index}}}")]}
        else:
            delta = {"tool_calls": [call_delta(index, f"c{index}", "look", '{"n": ')]}
        seen.add(index)
        frames += says.chunk(Chunk({"choices": [{"delta": delta, "finish_reason": None}]}, b""))
    frames += says.end()
    events = [json.loads(line[6:]) for line in frames.decode().split("\n") if line.startswith("data: ")]
    blocks = {}
    open_block = None
    for event in events:
        if event["type"] == "content_block_start":
            assert open_block is None
            open_block = event["index"]
            blocks[open_block] = [event["content_block"].get("id"), ""]
        elif event["type"] == "content_block_delta":
            assert event["index"] == open_block
            blocks[open_block][1] += event["delta"].get("partial_json") or event["delta"]["text"]
        elif event["type"] == "content_block_stop":
            assert event["index"] == open_block
            open_block = None
    assert dict(blocks.values()) == {None: "text", **{f"c{n}": f'{{"n": {n}}}' for n in range(3)}}
