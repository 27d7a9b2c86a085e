"""Public reports of what goes wrong between clients and engines, each as a test that has its number."""

import json
import socket
import threading

import openai
import pytest
from fake_engine import (
    DONE,
    Call,
    after,
    answer,
    chunk,
    complete,
    hang,
    message,
    play,
    wait_for,
    waiting_for,
)
from raw_socket import read_to, reset
from starlette.middleware.base import BaseHTTPMiddleware

from ple_gateway.app import create_app
from ple_gateway.messages import Conversation
from ple_gateway.settings import Settings

USER = {"role": "user", "content": "hi"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:,x"}}


def sent(messages):
    return Conversation(messages).messages


@pytest.mark.parametrize("events", [[DONE], [chunk({"role": "assistant"}), DONE], [chunk({}, "stop"), DONE]])
def test_g29_an_answer_without_output_is_a_counted_failure(gateway, engine, events):
    engine.script = play(*events)
    answered = gateway.chat(stream=True)
    assert answered.events[-2]["error"]["type"] == "server_error"
    assert "stop" not in [
        choice["finish_reason"] for event in answered.events[:-1] for choice in event.get("choices", [])
    ]
    failed = {"route": "/v1/chat/completions", "outcome": "stream_failed"}
    wait_for(lambda: gateway.metric("requests_total", **failed) == 1, "the failure is counted")


def test_g31_four_streams_that_are_reset_free_the_engine(gateway, engine):
    go_on = threading.Event()

    def script(call: Call) -> None:
        call.open_stream()
        call.event(chunk({"content": "x"}))
        call.wait_closed()

    engine.script = script
    socks = [gateway.open_chat(stream=True) for _ in range(4)]
    for sock in socks:
        read_to(sock, b'"x"')
    assert engine.running == 4
    for sock in socks:
        reset(sock)
    wait_for(lambda: engine.running == 0, "the engine works on nothing", timeout_s=2)
    go_on.set()


def test_g32_no_middleware_comes_between_a_request_and_its_disconnect():
    """Starlette's base class for middleware reads the body itself and hides that a client left."""
    app = create_app(Settings(http_address="127.0.0.1:0"))
    classes = [middleware.cls for middleware in app.user_middleware]
    assert classes
    assert not [cls for cls in classes if isinstance(cls, type) and issubclass(cls, BaseHTTPMiddleware)]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/messages", {"messages": [USER]}),
        ("/v1/responses", {"input": "hi"}),
    ],
)
def test_g33_a_client_that_leaves_is_noticed_on_every_route(gateway, engine, path, fields):
    """Nothing is sent meanwhile that could fail: the disconnect itself is waited for."""
    engine.script = hang
    body = json.dumps(fields).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=10) as sock:
        sock.sendall(head.encode() + body)
        wait_for(lambda: engine.running == 1, "the request is at the engine")
    wait_for(lambda: engine.running == 0, "the engine is free", timeout_s=2)


def test_g34_comments_go_on_while_tool_arguments_are_held_by_the_engine(start_gateway, engine):
    """The clock decides, not progress: engines buffer the arguments of a call for minutes."""
    gateway = start_gateway(commit_delay_s=0.05, keepalive_interval_s=0.05)
    go_on = threading.Event()
    first = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}
    rest = {"index": 0, "function": {"arguments": "{}"}}
    engine.script = play(
        chunk({"tool_calls": [first]}),
        waiting_for(go_on),
        chunk({"tool_calls": [rest]}),
        chunk({}, "tool_calls"),
        DONE,
    )
    with gateway.open_chat(stream=True) as sock:
        received = read_to(sock, b'"name":')
        while received.count(b": keep-alive") < 3:
            received += sock.recv(65536)
        go_on.set()
        read_to(sock, b"[DONE]")


def test_g37_a_place_is_free_only_when_the_engine_was_left(gateway, engine):
    """The next turn must not meet the one before."""
    engine.script = play(chunk({"content": "x"}), lambda call: call.wait_closed())
    sock = gateway.open_chat(stream=True)
    read_to(sock, b'"x"')
    sock.close()
    wait_for(lambda: gateway.gateway.gate.idle, "the place is free")
    wait_for(lambda: engine.running == 0, "the script ends", timeout_s=0.5)
    engine.script = complete("second")
    assert gateway.chat(stream=True).text == "second"


def test_g42_content_arrays_of_tools_are_flattened_and_their_pictures_move():
    tool = {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "a"}, IMAGE, "b"]}
    got = sent([USER, {"role": "assistant", "content": []}, tool, {"role": "user", "content": "q"}])
    assert got[1] == {"role": "assistant", "content": ""}
    assert got[2] == {"role": "tool", "tool_call_id": "c", "content": "a\nb"}
    assert got[3]["content"] == [IMAGE, {"type": "text", "text": "q"}]


@pytest.mark.parametrize("arguments", [None, "", "null"])
def test_g43_histories_with_null_arguments_or_no_calls(arguments):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    got = sent([USER, {"role": "assistant", "content": None, "tool_calls": [call]}])
    assert got[1]["tool_calls"][0]["function"]["arguments"] == "{}"
    assert got[1]["content"] is None
    assert sent([USER, {"role": "assistant", "content": "x", "tool_calls": []}])[1] == {
        "role": "assistant",
        "content": "x",
    }
    assert sent([USER, {"role": "assistant", "content": None, "tool_calls": None}])[1]["content"] == ""


def test_g44_system_messages_in_the_middle_become_marked_user_text():
    leading = [{"role": "system", "content": "one"}, {"role": "developer", "content": "two"}]
    got = sent([*leading, USER, {"role": "system", "content": "late"}, USER])
    assert got == [
        {"role": "system", "content": "one\n\ntwo"},
        USER,
        {"role": "user", "content": "[system]\nlate"},
        USER,
    ]


def test_g44_a_conversation_without_a_user_gets_an_empty_one():
    """Templates refuse it otherwise: histories that were cut begin with the model's turn."""
    assert sent([{"role": "system", "content": "s"}]) == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": ""},
    ]
    cut = [{"role": "assistant", "content": "a"}, {"role": "tool", "tool_call_id": "x", "content": "r"}]
    assert [message["role"] for message in sent(cut)] == ["user", "assistant", "tool"]


def test_g45_what_was_sent_before_stays_a_prefix():
    """A prefix cache finds nothing when late system text moves to the front."""
    turns = [USER, {"role": "assistant", "content": "a"}]
    late = {"role": "system", "content": "It is noon."}
    before = sent([{"role": "system", "content": "s"}, *turns, USER])
    now = sent([{"role": "system", "content": "s"}, *turns, USER, late, USER])
    assert now[: len(before)] == before


BILLING = "x-anthropic-billing-header: cc_version=2.1; cch=00af1;"


@pytest.mark.parametrize("role", ["system", "user", "developer"])
@pytest.mark.parametrize("as_parts", [True, False])
def test_g46_the_billing_line_is_stripped_in_any_role(role, as_parts):
    def prompt(line):
        text = f"{line}\nYou are an agent."
        return [{"role": role, "content": [{"type": "text", "text": text}] if as_parts else text}, USER]

    assert sent(prompt(BILLING)) == sent(prompt(BILLING.replace("af", "bb")))
    assert sent(prompt(BILLING))[0]["content"] == "You are an agent."
    assert BILLING in str(sent([{"role": "user", "content": f"What is {BILLING}?"}]))
    alone = [{"type": "text", "text": BILLING}, {"type": "text", "text": "You are an agent."}]
    assert sent([{"role": role, "content": alone}, USER])[0]["content"] == "You are an agent."


def test_g46_what_came_from_the_prefix_cache_is_counted(gateway, engine):
    usage = {"prompt_tokens": 90, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 80}}
    engine.script = answer(200, {**message("x"), "usage": usage})
    assert gateway.chat().json["usage"]["prompt_tokens_details"]["cached_tokens"] == 80
    assert gateway.metric("tokens_total", kind="cached") == 80
    assert gateway.metric("tokens_total", kind="prompt") == 90


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_g48_thoughts_are_accepted_and_given_under_both_names(gateway, engine, name):
    engine.script = answer(200, message("x", **{name: "hm"}))
    got = gateway.chat(messages=[USER, {"role": "assistant", "content": "a", name: "why"}, USER])
    turn = engine.calls[-1].request["messages"][1]
    assert turn["reasoning"] == turn["reasoning_content"] == "why"
    said = got.json["choices"][0]["message"]
    assert said["reasoning"] == said["reasoning_content"] == "hm"


@pytest.mark.parametrize(
    ("path", "name", "as_sent"),
    [
        ("/v1/chat/completions", "max_tokens", "max_tokens"),
        ("/v1/chat/completions", "max_completion_tokens", "max_completion_tokens"),
        ("/v1/messages", "max_tokens", "max_tokens"),
        ("/v1/responses", "max_output_tokens", "max_completion_tokens"),
    ],
)
def test_g49_more_tokens_than_the_window_has_are_clamped(gateway, engine, path, name, as_sent):
    body = {"model": "triplex-tiny", "messages": [USER], "input": "hi", name: 65_535}
    assert gateway.request("POST", path, body).status == 200
    assert engine.calls[-1].request[as_sent] == 32_768
    assert gateway.request("POST", path, {**body, name: 100}).status == 200
    assert engine.calls[-1].request[as_sent] == 100


def test_g50_overflow_has_openais_code_in_every_api(gateway, engine):
    sentence = "This model's maximum context length is 8 tokens. However, your request has 9 input tokens."
    engine.script = answer(400, {"error": {"message": sentence, "param": "input_text", "code": 400}})
    for path in ("/v1/chat/completions", "/v1/responses"):
        refused = gateway.request("POST", path, {"messages": [USER], "input": "hi"})
        assert refused.status == 400
        assert refused.error == {
            "message": sentence,
            "type": "invalid_request_error",
            "param": "messages",
            "code": "context_length_exceeded",
        }


@pytest.mark.parametrize(
    ("script", "status"),
    [
        (answer(502, {}), 502),
        (answer(504, {}), 504),
        (answer(500, {}), 500),
        (complete(), 502),
        (lambda call: call.reset(), 502),
    ],
    ids=["502", "504", "500", "empty", "reset"],
)
def test_g53_what_repeats_a_long_prefill_tells_sdks_to_leave_it(gateway, engine, script, status):
    engine.script = script
    answered = gateway.chat()
    assert answered.status == status
    assert answered.headers["x-should-retry"] == "false"
    calls = len(engine.calls)
    with (
        openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="unused", max_retries=3, timeout=10) as client,
        pytest.raises(openai.InternalServerError),
    ):
        client.chat.completions.create(model="triplex-tiny", messages=[USER])
    assert len(engine.calls) == 2 * calls, "the SDK did not try again"


def test_g54_headers_come_while_the_engine_is_silent(gateway, engine):
    """Clients give up after 45 to 120 s without headers; by default they come within a second."""
    assert Settings().commit_delay_s < 1
    go_on = threading.Event()
    engine.script = after(go_on, complete("x"))
    with gateway.open_chat(stream=True) as sock:
        assert sock.recv(65536).startswith(b"HTTP/1.1 200")
        assert not go_on.is_set()
        go_on.set()
        read_to(sock, b"[DONE]")
