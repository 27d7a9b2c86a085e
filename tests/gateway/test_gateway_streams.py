"""The streamed relay: every event arrives, every failure is told, nothing is invented."""

import json
import threading
import time

import pytest
from fake_engine import USAGE, USAGE_CHUNK, Call, answer, chunk, complete, stream_of, wait_for


def test_g35_stream_has_its_headers_and_ends_with_done(gateway, engine):
    engine.script = complete("Hel", "lo")
    answered = gateway.chat(stream=True)
    assert answered.status == 200
    assert answered.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answered.headers["cache-control"] == "no-cache"
    assert answered.headers["x-accel-buffering"] == "no"
    assert "content-length" not in answered.headers
    assert answered.text == "Hello"
    assert answered.events[-1] == "[DONE]"
    assert answered.events.count("[DONE]") == 1
    assert gateway.metric("tokens_total", kind="completion") == USAGE["completion_tokens"]


def test_usage_is_asked_for_always_and_shown_only_on_request(gateway, engine):
    plain = gateway.chat(stream=True)
    assert engine.calls[-1].request["stream_options"] == {"include_usage": True}
    assert all("usage" not in event for event in plain.events[:-1])
    asked = gateway.chat(stream=True, stream_options={"include_usage": True})
    usages = [event["usage"] for event in asked.events[:-1]]
    assert usages[-1] == USAGE
    assert all(usage is None for usage in usages[:-1])
    assert asked.events[-2]["choices"] == []


def test_usage_null_from_the_engine_is_taken_out(gateway, engine):
    def script(call: Call) -> None:
        call.open_stream()
        for event in stream_of("x"):
            call.event(event if isinstance(event, bytes) else {"usage": None, **event})
        call.end_stream()

    engine.script = script
    assert all("usage" not in event for event in gateway.chat(stream=True).events[:-1])


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
def test_g28_one_byte_chunks_of_any_line_end(gateway, engine, line_end):
    text = "Grüße 你好 🎉 a\u2028b\u0085c"

    def script(call: Call) -> None:
        call.open_stream()
        for event in stream_of(text):
            data = event if isinstance(event, bytes) else json.dumps(event, ensure_ascii=False).encode()
            for byte in b": comment" + line_end + b"data:" + data + line_end * 2:
                call.chunk(bytes([byte]))
        call.end_stream()

    engine.script = script
    assert gateway.chat(stream=True).text == text


def test_separators_are_escaped_for_clients_that_split_text_lines(gateway, engine):
    engine.script = complete("a\u2028b\u2029c\u0085d")
    answered = gateway.chat(stream=True)
    assert answered.text == "a\u2028b\u2029c\u0085d"
    assert len(answered.body.decode().splitlines()) == len(answered.body.split(b"\n")) - 1


def test_g36_event_of_900_kilobytes(gateway, engine):
    text = "x" * 900_000
    engine.script = complete(text)
    assert gateway.chat(stream=True).text == text


def test_g36_event_over_the_limit_is_an_error_frame(start_gateway, engine):
    gateway = start_gateway(max_event_bytes=10_000)
    engine.script = complete("x" * 20_000)
    assert gateway.chat(stream=True).events[-2]["error"]["type"] == "server_error"


def test_g35_events_pass_at_once(gateway, engine):
    go_on = threading.Event()

    def script(call: Call) -> None:
        call.open_stream()
        call.event(chunk({"role": "assistant", "content": "first"}))
        assert go_on.wait(10)
        call.event(chunk({}, "stop"))
        call.event(b"[DONE]")
        call.end_stream()

    engine.script = script
    with gateway.open_chat(stream=True) as sock:
        received = b""
        while b"first" not in received:
            received += sock.recv(65536)
        go_on.set()
        while b"[DONE]" not in received:
            received += sock.recv(65536)


def cut_before_anything(call: Call) -> None:
    call.reset()


def cut_after_headers(call: Call) -> None:
    call.open_stream()
    call.reset()


def cut_after_role(call: Call) -> None:
    call.open_stream()
    call.event(chunk({"role": "assistant", "content": ""}))
    call.reset()


def cut_after_content(call: Call) -> None:
    call.open_stream()
    call.event(chunk({"content": "some"}))
    call.sock.shutdown(1)
    call.sock.close()


def cut_before_done(call: Call) -> None:
    call.open_stream()
    call.event(chunk({"content": "some"}))
    call.event(chunk({}, "stop"))
    call.sock.shutdown(1)
    call.sock.close()


def end_without_finish_reason(call: Call) -> None:
    call.open_stream()
    call.event(chunk({"content": "some"}))
    call.event(b"[DONE]")
    call.end_stream()


def end_without_done(call: Call) -> None:
    call.open_stream()
    call.event(chunk({"content": "some"}))
    call.event(chunk({}, "stop"))
    call.end_stream()


def end_empty(call: Call) -> None:
    call.open_stream()
    call.end_stream()


def send_no_json(call: Call) -> None:
    call.open_stream()
    call.event(b"{nonsense")
    call.event(b"[DONE]")
    call.end_stream()


def send_error(call: Call) -> None:
    call.open_stream()
    call.event(chunk({"content": "some"}))
    call.event(
        {"error": {"message": "engine core died", "type": "InternalServerError", "param": None, "code": 500}}
    )
    call.event(b"[DONE]")
    call.end_stream()


@pytest.mark.parametrize(
    "script",
    [
        cut_after_headers,
        cut_after_role,
        cut_after_content,
        cut_before_done,
        end_without_finish_reason,
        end_without_done,
        end_empty,
        send_no_json,
        send_error,
    ],
    ids=lambda script: script.__name__,
)
def test_g29_failures_after_the_200_are_error_frames(gateway, engine, script):
    engine.script = script
    answered = gateway.chat(stream=True)
    assert answered.status == 200
    error = answered.events[-2]["error"]
    assert error["type"] == "server_error"
    assert error["message"]
    assert answered.events[-1] == "[DONE]"
    finishes = [event["choices"][0]["finish_reason"] for event in answered.events[:-2]]
    assert finishes.count("stop") == (1 if script in {cut_before_done, end_without_done} else 0)
    assert len(engine.calls) == 1, "a POST that was accepted is never sent twice"


def test_g53_reset_before_a_status_is_told_and_never_sent_again(gateway, engine):
    engine.script = cut_before_anything
    answered = gateway.chat(stream=True)
    assert answered.status == 502
    assert answered.error["code"] == "backend_unavailable"
    assert answered.headers["x-should-retry"] == "false"
    assert len(engine.calls) == 1


def test_g50_overflow_is_a_status_in_the_words_of_the_engine(gateway, engine):
    sentence = (
        "This model's maximum context length is 32768 tokens. However, your request has 40000 input tokens."
    )
    engine.script = answer(
        400, {"error": {"message": sentence, "type": "BadRequestError", "param": "input_tokens", "code": 400}}
    )
    answered = gateway.chat(stream=True)
    assert answered.status == 400
    assert answered.error["code"] == "context_length_exceeded"
    assert answered.error["param"] == "messages"
    assert answered.error["message"] == sentence


def test_g34_slow_status_gets_headers_comments_and_then_an_error_frame(start_gateway, engine):
    gateway = start_gateway(commit_delay_s=0.1, keepalive_interval_s=0.1)
    go_on = threading.Event()

    def script(call: Call) -> None:
        assert go_on.wait(10)
        call.answer(400, {"error": {"message": "too late for a status", "code": 400}})

    engine.script = script
    with gateway.open_chat(stream=True) as sock:
        received = b""
        while received.count(b": keep-alive\n\n") < 3:
            received += sock.recv(65536)
        assert received.startswith(b"HTTP/1.1 200")
        go_on.set()
        while b"[DONE]" not in received:
            received += sock.recv(65536)
        assert b"too late for a status" in received
    assert gateway.metric("keepalive_comments_total") >= 3


def test_comments_can_be_off(start_gateway, engine):
    gateway = start_gateway(commit_delay_s=0.05, keepalive_interval_s=0)

    def script(call: Call) -> None:
        time.sleep(0.4)
        complete("x")(call)

    engine.script = script
    assert b": keep-alive" not in gateway.chat(stream=True).body


@pytest.mark.parametrize("stage", ["headers", "first_token", "between_tokens"])
def test_silent_engine_runs_into_the_stage_limit(start_gateway, engine, stage):
    limits = {"headers_timeout_s": 0.2, "first_token_timeout_s": 0.2, "between_tokens_timeout_s": 0.2}
    gateway = start_gateway(commit_delay_s=5, **limits)

    def script(call: Call) -> None:
        if stage != "headers":
            call.open_stream()
        if stage == "between_tokens":
            call.event(chunk({"content": "x"}))
        call.wait_closed()

    engine.script = script
    answered = gateway.chat(stream=True)
    if stage == "headers":
        assert answered.status == 504
        error = answered.error
    else:
        error = answered.events[-2]["error"]
    assert error["code"] == "timeout"


def test_total_limit_ends_a_stream_that_never_ends(start_gateway, engine):
    gateway = start_gateway(total_timeout_s=0.5)

    def script(call: Call) -> None:
        call.open_stream()
        while True:
            call.event(chunk({"content": "x"}))
            time.sleep(0.02)

    engine.script = script
    assert gateway.chat(stream=True).events[-2]["error"]["code"] == "timeout"


def test_g48_reasoning_has_both_names(gateway, engine):
    def script(call: Call) -> None:
        call.open_stream()
        call.event(chunk({"reasoning": "hm"}))
        call.event(chunk({"reasoning_content": "so"}))
        call.event(chunk({"content": "x"}))
        call.event(chunk({}, "stop"))
        call.event(b"[DONE]")
        call.end_stream()

    engine.script = script
    deltas = [event["choices"][0]["delta"] for event in gateway.chat(stream=True).events[:-1]]
    assert deltas[0] == {"role": "assistant", "reasoning": "hm", "reasoning_content": "hm"}
    assert deltas[1] == {"reasoning": "so", "reasoning_content": "so"}


def test_g47_broken_utf8_from_the_engine_becomes_a_replacement_character(gateway, engine):
    def script(call: Call) -> None:
        call.open_stream()
        call.event(json.dumps(chunk({"content": "a@b"})).encode().replace(b"@", b"\xe4\xbd"))
        for event in stream_of():
            call.event(event)
        call.end_stream()

    engine.script = script
    assert gateway.chat(stream=True).text == "a\ufffdb"


def test_null_choices_become_a_list(gateway, engine):
    def script(call: Call) -> None:
        call.open_stream()
        call.event({**chunk(), "choices": None})
        call.event(chunk({"content": "x"}, "stop"))
        call.event(USAGE_CHUNK)
        call.event(b"[DONE]")
        call.end_stream()

    engine.script = script
    assert gateway.chat(stream=True).events[0]["choices"] == []


def test_empty_answer_is_no_success(gateway, engine):
    engine.script = complete()
    assert gateway.chat(stream=True).events[-2]["error"]["code"] == "empty_answer"
    wait_for(lambda: gateway.metric("answers_rejected_total", reason="empty_answer") == 1, "it is counted")


def test_empty_answer_before_a_stop_string_is_fine(gateway, engine):
    engine.script = complete()
    assert "error" not in gateway.chat(stream=True, stop="x").events[-2]


def test_several_choices_all_have_to_finish(gateway, engine):
    def script(call: Call) -> None:
        call.open_stream()
        for index in range(call.request["n"] - 1):
            call.event(
                {**chunk(), "choices": [{"index": index, "delta": {"content": "x"}, "finish_reason": "stop"}]}
            )
        call.event(b"[DONE]")
        call.end_stream()

    engine.script = script
    assert "error" in gateway.chat(stream=True, n=2).events[-2]
