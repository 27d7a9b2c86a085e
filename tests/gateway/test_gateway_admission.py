"""Who may go to the engine and who waits: over real sockets, with an engine that tells its pool."""

import base64
import io
import json
import threading
import time
from contextlib import ExitStack

import pytest
from fake_engine import CAPACITY, DONE, Call, chunk, complete, play, wait_for
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from ple_gateway.images.size import picture_px

# Two requests of 250k tokens fill it, as in the release build with a draft model.
POOL = {**CAPACITY, "num_blocks": 170, "max_model_len": 262_144, "max_num_seqs": 4}


class Held:
    """A script whose answers wait until they are let go."""

    def __init__(self) -> None:
        self.go_on = threading.Event()

    def __call__(self, call: Call) -> None:
        assert self.go_on.wait(10)
        complete("x")(call)


@pytest.fixture
def held(engine):
    engine.script = Held()
    yield engine.script
    engine.script.go_on.set()


def chat_in_thread(stack, gateway, answers, headers=None, **fields):
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}

    def ask():
        answers.append((fields.get("user"), gateway.request("POST", "/v1/chat/completions", body, headers)))

    thread = threading.Thread(target=ask)
    thread.start()
    stack.callback(thread.join, 15)


def read_all(sock):
    received = b""
    while data := sock.recv(65536):
        received += data
        if DONE in received:
            break
    return received


def test_blocks_are_counted_and_a_request_that_does_not_fit_waits(start_gateway, engine, held):
    engine.capacity = POOL
    gateway = start_gateway()
    gateway.wait_ready()
    text = "x" * 700_000  # 219,000 tokens by the estimate, which is near no boundary
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(
                gateway.open_chat(messages=[{"role": "user", "content": text}], max_tokens=100)
            )
        wait_for(lambda: len(engine.calls) == 2, "two long ones are at the engine")
        assert gateway.metric("budget_blocks") == 168
        assert gateway.metric("reserved_blocks") == 2 * (58 + 23)
        small = stack.enter_context(gateway.open_chat(stream=True, max_tokens=10))
        wait_for(lambda: gateway.metric("requests_queued", lane="interactive") == 1, "the small one waits")
        assert len(engine.calls) == 2
        held.go_on.set()
        assert b'"content":"x"' in read_all(small).replace(b": ", b":")
    wait_for(lambda: gateway.metric("reserved_blocks") == 0, "all blocks are given back")


def test_sequences_of_the_engine_are_a_limit_too(start_gateway, engine, held):
    engine.capacity = {**POOL, "num_blocks": 100_000, "max_num_seqs": 2}
    gateway = start_gateway()
    gateway.wait_ready()
    with ExitStack() as stack:
        answers: list = []
        for _ in range(3):
            chat_in_thread(stack, gateway, answers)
        wait_for(lambda: gateway.metric("requests_queued") == 1, "the third waits")
        assert gateway.metric("requests_in_flight") == 2
        held.go_on.set()


def test_capacity_is_read_again_when_the_engine_comes_back(start_gateway, engine):
    gateway = start_gateway()
    gateway.wait_ready()
    assert gateway.metric("budget_blocks") == CAPACITY["num_blocks"] - 2
    engine.close()
    wait_for(lambda: gateway.request("GET", "/readyz").status == 503, "the engine's end is seen")
    engine.capacity = {**CAPACITY, "num_blocks": 242}
    engine.open()
    gateway.wait_ready()
    assert gateway.metric("budget_blocks") == 240
    engine.capacity = None
    wait_for(
        lambda: gateway.metric("budget_blocks") == 0, "an engine without that route: requests are counted"
    )
    assert gateway.chat().status == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_g50_a_prompt_that_never_fits_is_refused_before_it_waits(start_gateway, engine, path):
    gateway = start_gateway(max_in_flight=1)
    gateway.wait_ready()
    engine.token_count = 40_000
    text = "x" * 100_000
    body = (
        {"prompt": text} if path == "/v1/completions" else {"messages": [{"role": "user", "content": text}]}
    )
    refused = gateway.request("POST", path, {**body, "stream": True})
    assert (refused.status, refused.error["code"]) == (400, "context_length_exceeded")
    assert "maximum context length is 32768 tokens" in refused.error["message"]
    assert "40000" in refused.error["message"]
    assert not engine.calls
    assert len(engine.tokenized) == 1
    engine.token_count = 31_000
    assert gateway.request("POST", path, body).status == 200, "the engine's count decides, not the estimate"


def test_small_prompts_are_not_counted_and_pictures_are_not_sent_to_be_counted(
    start_gateway, engine, tmp_path
):
    gateway = start_gateway()
    gateway.wait_ready()
    engine.token_count = 5
    assert gateway.chat().status == 200
    assert not engine.tokenized
    pixel = (
        "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9"
        "awAAAABJRU5ErkJggg=="
    )
    parts = [{"type": "text", "text": "x" * 100_000}, {"type": "image_url", "image_url": {"url": pixel}}]
    assert gateway.chat(messages=[{"role": "user", "content": parts}]).status == 200
    counted = engine.tokenized[-1].request
    assert counted["messages"] == [{"role": "user", "content": [parts[0]]}]


def test_counting_that_fails_refuses_nothing(start_gateway, engine):
    gateway = start_gateway()
    gateway.wait_ready()

    def script(call: Call) -> None:
        if call.path == "/tokenize":
            call.answer(500, {"error": "no"})
        else:
            complete("x")(call)

    engine.script = script
    assert gateway.chat(messages=[{"role": "user", "content": "x" * 200_000}]).status == 200


def test_g51_the_queue_is_bounded_and_refuses_before_the_body_is_read(start_gateway, engine, held):
    gateway = start_gateway(max_in_flight=1, max_queued=2)
    gateway.wait_ready()
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(gateway.open_chat(stream=True))
        wait_for(lambda: gateway.metric("requests_queued") == 2, "two wait")
        refused = gateway.request("POST", "/v1/chat/completions", b"{nonsense")
        assert (refused.status, refused.error["code"]) == (503, "overloaded")
        assert 1 <= int(refused.headers["retry-after"]) <= 120
        assert gateway.metric("rejections_total", reason="queue_full") == 1
        held.go_on.set()
    assert len(engine.calls) <= 3


def test_g52_background_waits_for_interactive_work(start_gateway, engine, held):
    gateway = start_gateway(max_in_flight=1)
    gateway.wait_ready()
    answers: list = []
    with ExitStack() as stack:
        chat_in_thread(stack, gateway, answers, user="first")
        wait_for(lambda: engine.calls, "the first is at the engine")
        chat_in_thread(stack, gateway, answers, user="background", max_tokens=5)
        wait_for(lambda: gateway.metric("requests_queued", lane="background") == 1, "background waits")
        chat_in_thread(stack, gateway, answers, user="interactive")
        chat_in_thread(stack, gateway, answers, {"x-priority": "interactive"}, user="asked for", max_tokens=5)
        wait_for(lambda: gateway.metric("requests_queued", lane="interactive") == 2, "interactive waits")
        held.go_on.set()
    assert [call.request["user"] for call in engine.calls][-1] == "background"
    assert [answer.status for _, answer in answers] == [200] * 4
    assert gateway.metric("queue_wait_seconds_count", lane="background") == 1


def test_g52_background_that_waits_long_rises(start_gateway, engine, held):
    gateway = start_gateway(max_in_flight=1, lane_ageing_s=0.2)
    gateway.wait_ready()
    answers: list = []
    with ExitStack() as stack:
        chat_in_thread(stack, gateway, answers, user="first")
        wait_for(lambda: engine.calls, "the first is at the engine")
        chat_in_thread(stack, gateway, answers, {"x-priority": "background"}, user="background")
        wait_for(lambda: gateway.metric("requests_queued", lane="background") == 1, "background waits")
        began_s = time.monotonic()
        wait_for(lambda: time.monotonic() - began_s > 0.25, "a class up")
        chat_in_thread(stack, gateway, answers, user="interactive")
        wait_for(lambda: gateway.metric("requests_queued") == 2, "both wait")
        held.go_on.set()
    assert [call.request["user"] for call in engine.calls] == ["first", "background", "interactive"]


def test_g52_a_key_has_its_share_and_no_more(start_gateway, engine, held):
    gateway = start_gateway(
        api_keys="mine, yours background", max_in_flight=10, max_in_flight_per_key=2, max_queued_per_key=1
    )
    mine, yours = ({"authorization": f"Bearer {key}"} for key in ("mine", "yours"))
    gateway.wait_ready()
    answers: list = []
    with ExitStack() as stack:
        for _ in range(3):
            chat_in_thread(stack, gateway, answers, mine)
        wait_for(lambda: gateway.metric("requests_queued") == 1, "the third waits for its key's others")
        body = {"messages": [{"role": "user", "content": "hi"}]}
        refused = gateway.request("POST", "/v1/chat/completions", body, mine)
        assert (refused.status, refused.error["type"]) == (429, "rate_limit_error")
        assert 1 <= int(refused.headers["retry-after"]) <= 120
        for _ in range(3):
            chat_in_thread(stack, gateway, answers, yours)
        wait_for(lambda: gateway.metric("requests_queued", lane="background") == 1, "the key's own lane")
        assert gateway.metric("requests_in_flight") == 4
        held.go_on.set()
    assert [answer.status for _, answer in answers] == [200] * 6


def test_g54_headers_and_comments_come_while_a_stream_is_queued(start_gateway, engine, held):
    gateway = start_gateway(max_in_flight=1, commit_delay_s=0.2, keepalive_interval_s=0.1)
    gateway.wait_ready()
    with gateway.open_chat() as first, gateway.open_chat(stream=True) as second:
        began_s = time.monotonic()
        received = second.recv(65536)
        assert time.monotonic() - began_s < 0.8
        assert received.startswith(b"HTTP/1.1 200 OK")
        while received.count(b": keep-alive") < 2:
            received += second.recv(65536)
        held.go_on.set()
        assert DONE in read_all(second)
        assert first.recv(1)


def test_queued_too_long_is_told_in_the_stream(start_gateway, engine, held):
    gateway = start_gateway(max_in_flight=1, queue_timeout_s=0.3, commit_delay_s=0.1)
    gateway.wait_ready()
    with gateway.open_chat() as first:
        wait_for(lambda: engine.calls, "the first is at the engine")
        answered = gateway.chat(stream=True)
        assert answered.events[-2]["error"]["code"] == "overloaded"
        held.go_on.set()
        assert first.recv(1)


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("mark", [{"x-stainless-retry-count": "1"}, {"idempotency-key": "same"}])
def test_g53_a_retry_of_what_is_in_flight_is_refused(gateway, engine, held, monkeypatch, streamed, mark):
    monkeypatch.setattr("ple_gateway.duplicates._LEAVE_S", 0.1)
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": streamed}
    answers: list = []
    with ExitStack() as stack:
        first = {"idempotency-key": "same"}
        chat_in_thread(stack, gateway, answers, first, stream=streamed)
        wait_for(lambda: engine.calls, "the first is at the engine")
        refused = gateway.request("POST", "/v1/chat/completions", body, mark)
        assert (refused.status, refused.error["code"]) == (409, "duplicate_request")
        assert refused.headers["x-should-retry"] == "false"
        chat_in_thread(stack, gateway, answers, stream=streamed)  # a second sample is no retry
        wait_for(lambda: len(engine.calls) == 2, "an unmarked twin is served")
        held.go_on.set()
    assert [answer.status for _, answer in answers] == [200, 200]
    assert gateway.request("POST", "/v1/chat/completions", body, mark).status == 200


def test_g53_a_retry_waits_for_the_end_of_the_attempt_that_its_client_gave_up(gateway, engine, held):
    first = gateway.open_chat()
    wait_for(lambda: engine.calls, "the first is at the engine")
    answers: list = []
    with ExitStack() as stack:
        chat_in_thread(
            stack, gateway, answers, {"x-stainless-retry-count": "1"}, **json.loads(engine.calls[0].body)
        )
        first.close()
        held.go_on.set()
    assert [answer.status for _, answer in answers] == [200]


@pytest.mark.parametrize("form", ["PNG", "JPEG"])
@given(width_px=st.integers(1, 600), height_px=st.integers(1, 600))
@settings(max_examples=15)
def test_pictures_are_measured_without_decoding(form, width_px, height_px):
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x010E] = "x" * 3000  # metadata before the size
    Image.new("RGB", (width_px, height_px)).save(file, form, exif=exif, progressive=True)
    encoded = base64.b64encode(file.getvalue()).decode()
    assert picture_px(f"data:image/x;base64,{encoded}") == width_px * height_px


@given(st.binary(max_size=60), st.sampled_from([b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe0"]))
def test_what_is_no_picture_has_no_size(tail, head):
    px = picture_px("data:image/png;base64," + base64.b64encode(head + tail).decode())
    assert px is None or px >= 0
    assert picture_px("data:image/png;base64,%%%") is None


def test_role_before_the_prompt_is_read_is_no_token(start_gateway, engine):
    gateway = start_gateway(between_tokens_timeout_s=0.1)
    gateway.wait_ready()
    role = chunk({"role": "assistant", "content": ""})
    engine.script = play(role, lambda _: time.sleep(0.4), chunk({"content": "x"}), chunk({}, "stop"), DONE)
    assert gateway.chat(stream=True).text == "x"
    assert gateway.metric("time_to_first_token_seconds_sum") > 0.3


def test_first_tokens_have_time_for_all_prompts_that_are_being_read(start_gateway, engine):
    gateway = start_gateway(first_token_timeout_s=0.05)
    gateway.wait_ready()
    long = [{"role": "user", "content": "x" * 6_400}]  # 2,000 tokens, 10 s by the estimate
    go_on = threading.Event()
    engine.script = play(lambda _: go_on.wait(5), chunk({"content": "x"}), chunk({}, "stop"), DONE)
    with gateway.open_chat(stream=True, messages=long) as first:
        wait_for(lambda: gateway.metric("requests_in_flight") == 1, "the long one is at the engine")
        wait_for(lambda: engine.calls, "it is being read")
        timer = threading.Timer(0.5, go_on.set)
        timer.start()
        assert gateway.chat(stream=True).text == "x"
        assert DONE in read_all(first)
        timer.join()
