"""An engine that is slow, odd or broken: what is not a report of its own."""

import threading

import openai
import pytest
from fake_engine import (
    DONE,
    USAGE_CHUNK,
    Call,
    FakeEngine,
    after,
    answer,
    chunk,
    complete,
    frame,
    hang,
    message,
    play,
    stream_of,
    wait_for,
    waiting_for,
)


def test_several_events_in_one_read(gateway, engine):
    events = b"".join(map(frame, stream_of("a", "b", "c")))
    engine.script = play(lambda call: call.chunk(events))
    assert gateway.chat(stream=True).text == "abc"


def test_comments_and_unknown_fields_of_the_engine_are_dropped(gateway, engine):
    odd = b": ping\n\n:\nevent: message\nid: 7\nretry: 10\n"
    engine.script = play(
        lambda call: call.chunk(odd + frame(chunk({"content": "x"}))), chunk({}, "stop"), DONE
    )
    answered = gateway.chat(stream=True)
    assert answered.text == "x"
    assert b"ping" not in answered.body


def test_first_token_that_comes_late_is_waited_for(start_gateway, engine):
    gateway = start_gateway(commit_delay_s=0.05, keepalive_interval_s=0.05, headers_timeout_s=5)
    go_on = threading.Event()
    engine.script = play(waiting_for(go_on), *stream_of("late"))
    with gateway.open_chat(stream=True) as sock:
        received = b""
        while received.count(b": keep-alive") < 4:
            received += sock.recv(65536)
        go_on.set()
        while b"[DONE]" not in received:
            received += sock.recv(65536)
    assert b"late" in received
    assert b"error" not in received


@pytest.mark.parametrize("streamed", [True, False])
def test_engine_that_accepts_and_never_answers(start_gateway, engine, streamed):
    gateway = start_gateway(commit_delay_s=5, headers_timeout_s=0.3, total_timeout_s=0.3)
    engine.script = hang
    answered = gateway.chat(stream=streamed)
    assert (answered.status, answered.error["code"]) == (504, "timeout")
    assert answered.headers["x-should-retry"] == "false"


def test_error_status_whose_body_is_cut(gateway, engine):
    def script(call: Call) -> None:
        call.raw(b"HTTP/1.1 500 X\r\ncontent-type: application/json\r\ncontent-length: 900\r\n\r\n{")
        call.reset()

    engine.script = script
    for streamed in (True, False):
        answered = gateway.chat(stream=streamed)
        assert answered.status == 502
        assert answered.error["type"] == "server_error"


def test_503_without_retry_after_gets_one(gateway, engine):
    engine.script = answer(503, {"error": {"message": "busy", "code": 503}})
    for streamed in (True, False):
        refused = gateway.chat(stream=streamed)
        assert refused.status == 503
        assert 1 <= int(refused.headers["retry-after"]) <= 120


def test_port_that_closes_and_opens_again(start_gateway):
    engine = FakeEngine()
    gateway = start_gateway(engine=engine)
    gateway.wait_ready()
    for _ in range(2):
        assert gateway.chat().status == 200
        engine.close()
        wait_for(lambda: gateway.request("GET", "/readyz").status == 503, "the loss is seen")
        engine.open()
        gateway.wait_ready()
    assert gateway.chat(stream=True).text == "hello"
    engine.close()


@pytest.mark.parametrize("ending", [Call.reset, Call.cut], ids=["reset", "cut"])
@pytest.mark.parametrize("finished", [True, False])
def test_connection_lost_after_content(gateway, engine, ending, finished):
    events = [chunk({"content": "some"}), *([chunk({}, "stop")] if finished else [])]
    seen = threading.Event()
    engine.script = play(*events, waiting_for(seen), ending)  # a reset takes what nobody has read with it
    with gateway.open_chat(stream=True) as sock:
        received = b""
        while (b'"stop"' if finished else b"some") not in received:
            received += sock.recv(65536)
        seen.set()
        while b"[DONE]" not in received:
            received += sock.recv(65536)
    assert b'"error":{' in received
    assert len(engine.calls) == 1


def test_connection_lost_after_the_end_costs_nothing(gateway, engine):
    engine.script = play(*stream_of("all"), Call.cut)
    answered = gateway.chat(stream=True)
    assert answered.text == "all"
    assert not any("error" in event for event in answered.events)


def test_half_of_a_character_costs_no_answer(gateway, engine):
    engine.script = answer(200, message("cut \ud83d"))  # as the JSON of Python writes it
    assert gateway.chat().json["choices"][0]["message"]["content"] == "cut ?"


@pytest.mark.parametrize("status", [204, 206, 302])
def test_status_that_is_no_answer_is_the_engines_fault(gateway, engine, status):
    engine.script = answer(status, b"")
    assert gateway.chat().status == 502


def test_retry_after_may_be_any_number(gateway, engine):
    engine.script = answer(429, {"error": {"message": "busy"}}, extra=f"retry-after: {'9' * 400}\r\n")
    refused = gateway.chat()
    assert (refused.status, refused.headers["retry-after"]) == (429, "120")


def test_usage_that_never_comes(gateway, engine):
    engine.script = play(*stream_of("x", usage=False))
    answered = gateway.chat(stream=True, stream_options={"include_usage": True})
    assert answered.text == "x"
    assert [event["usage"] for event in answered.events[:-1]] == [None] * 3


def test_content_and_reasoning_interleaved(gateway, engine):
    pieces = [{"reasoning": "a"}, {"content": "b"}, {"reasoning": "c", "content": "d"}, {"content": "e"}]
    engine.script = play(*map(chunk, pieces), chunk({}, "stop"), DONE)
    answered = gateway.chat(stream=True)
    deltas = [event["choices"][0]["delta"] for event in answered.events[:-1]]
    assert "".join(delta.get("content", "") for delta in deltas) == "bde"
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "ac"


def test_identity_role_and_finish_are_told_once(gateway, engine):
    """Engines and proxies before them change ids in a stream, repeat the role, and finish twice."""
    first = {**chunk({"content": "a"}), "id": "one", "created": None}
    second = {**chunk({"role": "assistant", "content": "b"}), "id": "two", "model": "/models/x", "created": 7}
    engine.script = play(
        first, second, chunk({}, "stop"), chunk({"content": "late"}, "stop"), USAGE_CHUNK, DONE
    )
    answered = gateway.chat(stream=True)
    events = answered.events[:-1]
    assert len({(event["id"], event["created"], event["model"]) for event in events}) == 1
    assert events[0]["id"] == "chatcmpl-one"
    assert isinstance(events[0]["created"], int)
    assert events[0]["model"] == "triplex-tiny"
    choices = [event["choices"][0] for event in events]
    assert [choice["delta"].get("role") for choice in choices] == ["assistant", None, None, None]
    assert [choice["finish_reason"] for choice in choices] == [None, None, "stop", None]
    assert answered.text == "ab"


def test_answer_in_one_piece_has_all_fields(gateway, engine):
    bare = {
        "choices": [{"message": {"content": "x"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 4},
    }
    engine.script = answer(200, bare)
    got = gateway.chat().json
    assert got["id"].startswith("chatcmpl-")
    assert isinstance(got["created"], int)
    assert got["model"] == "triplex-tiny"
    assert got["choices"][0] == {
        "index": 0,
        "message": {"role": "assistant", "content": "x", "refusal": None},
        "finish_reason": "stop",
    }
    assert got["usage"]["total_tokens"] == 4
    assert got["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert got["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


@pytest.mark.parametrize("streamed", [True, False])
def test_thoughts_that_use_up_the_limit_are_a_normal_answer(gateway, engine, streamed):
    if streamed:
        engine.script = play(chunk({"reasoning": "hm"}), chunk({}, "length"), DONE)
        events = gateway.chat(stream=True).events[:-1]
        assert [event["choices"][0]["finish_reason"] for event in events] == [None, "length"]
        assert events[0]["choices"][0]["delta"]["reasoning"] == "hm"
    else:
        engine.script = answer(200, message(None, "length", reasoning="hm"))
        choice = gateway.chat().json["choices"][0]
        assert choice["finish_reason"] == "length"
        assert choice["message"]["content"] == ""
        assert choice["message"]["reasoning"] == "hm"


def test_texts_of_errors_have_a_bound(gateway, engine):
    engine.script = answer(400, {"error": {"message": "x" * 10_000, "code": 400}})
    assert len(gateway.chat().error["message"]) == 4000


def test_the_log_says_which_side_ended_first(gateway, engine, caplog):
    engine.script = play(chunk({"content": "x"}), Call.cut)
    with caplog.at_level("INFO", logger="ple_gateway.exchange"):
        gateway.chat(stream=True)
        wait_for(lambda: "outcome=stream_failed" in caplog.text, "the engine's end is logged")
        engine.script = play(chunk({"content": "x"}), Call.wait_closed)
        with gateway.open_chat(stream=True) as sock:
            received = b""
            while b'"x"' not in received:
                received += sock.recv(65536)
        wait_for(lambda: "outcome=client_left" in caplog.text, "the client's end is logged")


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_answer_that_the_engine_gave_up_is_no_success(gateway, engine, reason):
    engine.script = complete("some", finish=reason)
    assert gateway.chat().status == 502
    assert gateway.chat(stream=True).events[-2]["error"]["code"] == "backend_unavailable"


def test_deltas_and_messages_that_are_missing(gateway, engine):
    bare = {**chunk({}, "stop"), "choices": [{"index": 0, "delta": None, "finish_reason": "stop"}]}
    engine.script = play(chunk({"content": "x"}), bare, DONE)
    assert [event["choices"][0]["delta"] for event in gateway.chat(stream=True).events[:-1]] == [
        {"role": "assistant", "content": "x"},
        {},
    ]
    engine.script = answer(200, {"choices": [{"index": 0, "message": None, "finish_reason": "stop"}]})
    assert gateway.chat().status == 502


def test_answer_without_finish_reason_is_no_success(gateway, engine):
    engine.script = complete("some", finish=None)
    assert gateway.chat().status == 502


def test_client_killed_after_the_finish(gateway, engine):
    """The engine still has usage to say: nobody waits for it."""
    closed_s = []

    def script(call: Call) -> None:
        call.open_stream()
        call.event(chunk({"content": "x"}))
        call.event(chunk({}, "stop"))
        closed_s.append(call.wait_closed())

    engine.script = script
    with gateway.open_chat(stream=True) as sock:
        received = b""
        while b'"stop"' not in received:
            received += sock.recv(65536)
    assert wait_for(lambda: closed_s, "the engine's connection is closed")[0] < 1


def test_raw_response_of_the_sdk(gateway, engine):
    engine.script = complete("hello")
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="unused", max_retries=0) as client:
        raw = client.chat.completions.with_raw_response.create(
            model="triplex-tiny", messages=[{"role": "user", "content": "hi"}]
        )
    assert raw.headers["x-request-id"] == engine.calls[-1].headers["x-request-id"]
    assert raw.parse().choices[0].message.content == "hello"


def test_client_with_an_idle_limit_sees_comments_while_it_waits(start_gateway, engine):
    """Such as Node's fetch, whose limit between two reads is 300 s: here a hundredth of a second to 3 s."""
    gateway = start_gateway(commit_delay_s=0.05, keepalive_interval_s=0.05)
    go_on = threading.Event()
    engine.script = after(go_on, complete("x"))
    with gateway.open_chat(stream=True) as sock:
        sock.settimeout(3)
        received = b""
        while received.count(b": keep-alive") < 5:
            received += sock.recv(65536)
        go_on.set()
        while b"[DONE]" not in received:
            received += sock.recv(65536)
