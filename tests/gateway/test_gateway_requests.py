"""What clients send: limits, parameters, messages; every refusal is a 4xx that says where."""

import json
import socket

import pytest
from fake_engine import complete, wait_for
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ple_gateway.body import parse_object
from ple_gateway.errors import GatewayError
from ple_gateway.messages import Conversation
from ple_gateway.parameters import check_parameters

USER = {"role": "user", "content": "hi"}


def post(gateway, body, **headers):
    return gateway.request("POST", "/v1/chat/completions", body, headers)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b'{"messages": NaN}',
        b'{"temperature": Infinity}',
        b'{"a": 1e999}',
        b"\xff\xfe",
    ],
)
def test_no_json_object_is_a_400(gateway, engine, body):
    answered = post(gateway, body)
    assert answered.status == 400
    assert answered.error["type"] == "invalid_request_error"
    assert not engine.calls


def test_content_type(gateway):
    assert post(gateway, b"a=b", **{"content-type": "application/x-www-form-urlencoded"}).status == 415
    assert post(gateway, b"{}", **{"content-encoding": "gzip"}).status == 415
    json_body = json.dumps({"messages": [USER]}).encode()
    assert post(gateway, json_body, **{"content-type": "application/json; charset=utf-8"}).status == 200


def test_body_limit_with_and_without_a_length(start_gateway):
    gateway = start_gateway(max_body_bytes=1000)
    answered = post(gateway, b" " * 2000)
    assert (answered.status, answered.error["code"]) == (413, "request_too_large")
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=10) as sock:
        sock.sendall(
            head + b"transfer-encoding: chunked\r\n\r\n" + b"7d0\r\n" + b" " * 2000 + b"\r\n0\r\n\r\n"
        )
        assert sock.recv(65536).startswith(b"HTTP/1.1 413")


def test_all_bodies_together_are_bounded(start_gateway):
    gateway = start_gateway(max_bodies_bytes=1000)
    answered = post(gateway, b" " * 2000)
    assert (answered.status, answered.error["code"]) == (503, "overloaded")
    assert gateway.chat().status == 200


def test_body_that_never_comes_is_a_408(start_gateway):
    gateway = start_gateway(body_read_timeout_s=0.2)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=10) as sock:
        sock.sendall(head + b"content-length: 9\r\n\r\n{")
        assert sock.recv(65536).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize("depth", [300, 5000, 200_000])
def test_deep_json_is_a_400(gateway, depth):
    answered = post(gateway, b'{"a":' * depth + b"1" + b"}" * depth)
    assert answered.status == 400
    assert "deep" in answered.error["message"]


def test_large_integers_stay_exact_and_unknown_fields_pass(gateway, engine):
    number = 2**100 + 1
    post(
        gateway, json.dumps({"messages": [USER], "vendor": {"x": [number, 0.1]}, "seed": 2**53 + 1}).encode()
    )
    assert engine.calls[-1].request["vendor"] == {"x": [number, 0.1]}
    assert engine.calls[-1].request["seed"] == 2**53 + 1


def test_last_of_duplicate_keys_wins(gateway, engine):
    post(gateway, b'{"messages": [], "messages": [{"role": "user", "content": "last"}]}')
    assert engine.calls[-1].request["messages"] == [{"role": "user", "content": "last"}]


def test_text_that_strict_parsers_refuse_is_repaired(gateway, engine):
    post(gateway, b'{"messages": [{"role": "user", "content": "a\\ud800b\xffc\x01d"}]}')
    assert engine.calls[-1].request["messages"][0]["content"] == "a\ufffdb\ufffdc\x01d"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 2.1),
        ("temperature", -1),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 1.5),
        ("frequency_penalty", -2.5),
        ("presence_penalty", 3),
        ("n", 0),
        ("n", 129),
        ("n", 1.5),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_completion_tokens", 0),
        ("max_tokens", "many"),
        ("seed", 2**63),
        ("stop", ["a"] * 5),
        ("stop", ""),
        ("stop", [1]),
        ("stop", {"a": 1}),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"1": 101}),
        ("logit_bias", []),
        ("top_logprobs", 21),
        ("top_logprobs", 2),
        ("min_tokens", 2**60),
        ("allowed_token_ids", []),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
        ("tool_choice", "required"),
        ("tools", {}),
        ("functions", []),
        ("function_call", "auto"),
        ("guided_json", {}),
        ("guided_regex", "a"),
        ("prompt_embeds", "x"),
        ("chat_template", "{{x}}"),
        ("mm_processor_kwargs", {}),
        ("media_io_kwargs", {}),
        ("priority", 1),
        ("kv_transfer_params", {}),
        ("vllm_xargs", {}),
        ("structured_outputs", {"regex": "("}),
        ("model", 5),
    ],
)
def test_parameters_out_of_range_name_themselves(gateway, engine, name, value):
    answered = gateway.chat(**({"max_tokens": 9} if name == "min_tokens" else {}), **{name: value})
    assert answered.status == 400
    assert answered.error["param"] == name
    assert not engine.calls


def test_nested_chat_template_is_refused(gateway):
    answered = gateway.chat(chat_template_kwargs={"chat_template": "{{ 1 }}"})
    assert (answered.status, answered.error["param"]) == (400, "chat_template_kwargs.chat_template")
    assert gateway.chat(chat_template_kwargs={"enable_thinking": True}).status == 200


def test_top_p_of_zero_is_the_likeliest_token(gateway, engine):
    assert gateway.chat(top_p=0).status == 200
    assert 0 < engine.calls[-1].request["top_p"] < 1e-3


def test_unknown_fields_are_logged_by_name_only(caplog):
    with caplog.at_level("DEBUG", logger="ple_gateway.parameters"):
        fields = {"messages": [USER], "vendor_option": "PRIVATE", "Dear model": 1, "temperature": 1}
        check_parameters(fields, 8)
    assert caplog.messages == ["fields that the gateway does not know: vendor_option"]


def test_a_result_without_its_call_is_left_to_the_engine(caplog):
    stray = {"role": "tool", "tool_call_id": "PRIVATE", "content": "r"}
    with caplog.at_level("DEBUG", logger="ple_gateway.messages"):
        assert Conversation([USER, stray]).messages[1] == stray
    assert caplog.messages == ["tool results without their call: 1"]


def test_retries_can_be_seen_in_the_log(gateway, caplog):
    headers = {"idempotency-key": "key-1", "x-stainless-retry-count": "2"}
    with caplog.at_level("INFO", logger="ple_gateway.exchange"):
        gateway.request("GET", "/v1/models", headers=headers)
        gateway.request("GET", "/v1/models", headers={"idempotency-key": "a b\tc"})
        done = wait_for(  # a line is written after the answer was sent
            lambda: len(lines := [m for m in caplog.messages if "route=/v1/models" in m]) == 2 and lines,
            "both are logged",
        )
    assert done[0].endswith("retry=2 idempotency_key=key-1")
    assert done[1].endswith("retry=- idempotency_key=-")


def test_null_means_default(gateway, engine):
    names = [
        "temperature",
        "top_p",
        "n",
        "stop",
        "max_tokens",
        "stream",
        "tools",
        "response_format",
        "logit_bias",
        "model",
    ]
    assert gateway.chat(**dict.fromkeys(names)).status == 200
    assert set(engine.calls[-1].request) == {"messages", "model"}


def test_accepted_parameters(gateway, engine):
    fields = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "reasoning_effort": "low",
        "stop": ["a", "b", "c", "d"],
        "max_tokens": 10.0,
        "tools": [],
        "tool_choice": "none",
    }
    assert gateway.chat(**fields).status == 200
    sent = engine.calls[-1].request
    assert sent["max_tokens"] == 10
    assert sent["reasoning_effort"] == "low"
    assert "tools" not in sent
    assert "tool_choice" not in sent


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (None, "messages"),
        ("hi", "messages"),
        (["hi"], "messages[0]"),
        ([{"role": "robot", "content": "x"}], "messages[0].role"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([USER, {"role": "user"}], "messages[1].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [5]}], "messages[0].content[0]"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "smell"}]}],
            "messages[0].content[1]",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0]"),
        (
            [{"role": "system", "content": [{"type": "image_url", "image_url": "data:,x"}]}],
            "messages[0].content[0]",
        ),
        ([USER, {"role": "assistant", "tool_calls": [{}]}], "messages[1].tool_calls[0]"),
        (
            [USER, {"role": "assistant", "tool_calls": [{"id": [], "function": {"name": "a"}}]}],
            "messages[1].tool_calls[0].id",
        ),
    ],
)
def test_bad_messages_name_the_place(gateway, engine, messages, param):
    answered = gateway.request("POST", "/v1/chat/completions", {"messages": messages})
    assert (answered.status, answered.error["param"]) == (400, param)
    assert not engine.calls


def test_messages_are_brought_into_one_form():
    call = {"id": "c1", "function": {"name": "f", "arguments": None}}
    sent = Conversation(
        [
            {"role": "developer", "content": "one"},
            {"role": "system", "content": [{"type": "text", "text": "two"}]},
            {"role": "user", "content": [{"type": "input_text", "text": "q"}], "name": None},
            {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "r"},
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "a"}, {"text": "b"}]},
            {"role": "assistant", "content": [], "tool_calls": []},
            {"role": "system", "content": "late"},
            {"role": "user", "content": ""},
        ]
    ).messages
    assert sent == [
        {"role": "system", "content": "one\n\ntwo"},
        {"role": "user", "content": "q"},
        {
            "role": "assistant",
            "content": None,
            "reasoning": "r",
            "reasoning_content": "r",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "a\nb"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "[system]\nlate"},
        {"role": "user", "content": ""},
    ]


def test_images_of_tool_results_move_to_the_next_user_turn():
    image = {"type": "image_url", "image_url": {"url": "data:,x"}}
    tool = {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "see"}, image]}
    followed = Conversation([USER, tool, {"role": "user", "content": "what is it?"}])
    assert followed.messages[1] == {"role": "tool", "tool_call_id": "c", "content": "see"}
    assert followed.messages[2]["content"] == [image, {"type": "text", "text": "what is it?"}]
    assert [place.name for place in followed.images] == ["messages[1].content[1]"]
    last = Conversation([USER, tool])
    assert last.messages[2] == {"role": "user", "content": [image]}


def unless_400(act):
    """What `act` returns, or None when it refuses with a 400; anything else is a failure."""
    try:
        return act()
    except GatewayError as error:
        if error.status != 400:
            raise
        return None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)
PART = (
    st.dictionaries(st.sampled_from(["type", "text", "image_url", "url", "source"]), JSON, max_size=4) | JSON
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool", "x"])},
    optional={
        "content": JSON | st.lists(PART, max_size=3),
        "tool_calls": JSON,
        "tool_call_id": JSON,
        "reasoning": JSON,
    },
)


@settings(max_examples=120)
@given(st.lists(MESSAGE | JSON, max_size=5))
def test_any_messages_are_accepted_or_refused_with_a_400(messages):
    sent = unless_400(lambda: Conversation(messages).messages) or []
    assert all(isinstance(message["content"], str | list | None) for message in sent)
    assert "system" not in [message["role"] for message in sent[1:]]


PARAMETERS = [
    "temperature",
    "n",
    "stop",
    "logit_bias",
    "tools",
    "tool_choice",
    "stream",
    "stream_options",
    "seed",
    "x",
]


@settings(max_examples=120)
@given(st.dictionaries(st.sampled_from(PARAMETERS), JSON))
def test_any_parameters_are_accepted_or_refused_with_a_400(request_fields):
    unless_400(lambda: check_parameters(request_fields, 8))


@settings(max_examples=120)
@given(st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_body_is_parsed_or_refused_with_a_400(body):
    assert isinstance(unless_400(lambda: parse_object(body, 20)), dict | None)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(["messages", "model", "response_format", *PARAMETERS]), JSON))
def test_fuzzed_requests_never_give_a_5xx(gateway, engine, body):
    engine.script = complete("x")
    assert gateway.request("POST", "/v1/chat/completions", body).status in {200, 400, 404}
