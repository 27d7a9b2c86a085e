"""The OpenAI API of a served 512-id model, over a socket, as the official client sees it."""

from __future__ import annotations

import base64
import io
import json
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx2 as httpx
import openai
import pytest
from PIL import Image

HELLO = [{"role": "user", "content": "Hello"}]
MODEL = "tiny-under-test"
FAR_IMAGE = {"type": "image_url", "image_url": {"url": "http://a/b"}}
BAD_SCHEMA = {"name": "x", "schema": {"type": "objekt"}}


@pytest.fixture(scope="module")
def http(server: Any) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


@pytest.fixture(scope="module")
def api(server: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def chat(http: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = http.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 12, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def refusal(
    http: httpx.Client, path: str = "/v1/chat/completions", **body: Any
) -> tuple[int, dict[str, Any]]:
    answer = http.post(path, json={"messages": HELLO, "max_tokens": 4, **body})
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return answer.status_code, error


def text_of(answer: dict[str, Any], choice: int = 0) -> str:
    return answer["choices"][choice]["message"]["content"]


def until(condition: Callable[[], object], what: str, deadline_s: float = 20) -> None:
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


# -- answers ---------------------------------------------------------------------------------------------


def test_chat_whole_and_streamed_agree(api: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 30, "temperature": 0}
    whole = api.chat.completions.create(**options)
    assert whole.model == MODEL
    assert whole.choices[0].finish_reason == "length"
    chunks = list(api.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert [chunk.choices[0].delta.role for chunk in chunks[:2]] == ["assistant", None]
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert [reason for reason in reasons if reason] == ["length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    assert whole.usage.completion_tokens == 30


def test_stream_frames(http: httpx.Client) -> None:
    body = {"messages": HELLO, "max_tokens": 3, "stream": True}
    with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        raw = answer.read()
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    frames = raw.decode().split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]
    assert all("usage" not in chunk for chunk in chunks)


def test_choices_and_seeds(http: httpx.Client) -> None:
    two = chat(http, n=2, seed=5)
    assert text_of(two) != text_of(two, 1)
    assert [choice["index"] for choice in two["choices"]] == [0, 1]
    again = chat(http, n=2, seed=5)
    assert [text_of(two, i) for i in (0, 1)] == [text_of(again, i) for i in (0, 1)]
    assert text_of(chat(http, seed=5)) == text_of(two)
    assert text_of(chat(http, seed=6)) == text_of(two, 1)


def test_company_does_not_change_an_answer(http: httpx.Client) -> None:
    alone = [chat(http, seed=seed, max_tokens=20) for seed in (1, 2)]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(lambda seed: chat(http, seed=seed, max_tokens=20), (1, 2)))
    assert [text_of(answer) for answer in together] == [text_of(answer) for answer in alone]


def test_stop_strings_and_ids(http: httpx.Client) -> None:
    whole = text_of(chat(http, temperature=0, max_tokens=30))
    stop = whole[7:10]
    cut = chat(http, temperature=0, max_tokens=30, stop=stop)
    assert text_of(cut) == whole[: whole.index(stop)]
    assert cut["choices"][0]["finish_reason"] == "stop"
    late = chat(http, temperature=0, max_tokens=30, stop=[stop], min_tokens=29)
    assert late["usage"]["completion_tokens"] >= 29
    tokens = http.post("/tokenize", json={"prompt": whole}).json()["tokens"]
    first = chat(http, temperature=0, max_tokens=30, stop_token_ids=tokens[:1])
    assert (text_of(first), first["choices"][0]["finish_reason"]) == ("", "stop")


def test_logprobs(http: httpx.Client) -> None:
    answer = chat(http, temperature=0, max_tokens=5, logprobs=True, top_logprobs=3)
    entries = answer["choices"][0]["logprobs"]["content"]
    assert len(entries) == 5
    for entry in entries:
        assert len(entry["top_logprobs"]) == 3
        assert entry["logprob"] == entry["top_logprobs"][0]["logprob"] <= 0
        assert bytes(entry["bytes"]).decode() == entry["token"]


def test_thinking_is_reported_apart(http: httpx.Client) -> None:
    answer = chat(http, chat_template_kwargs={"enable_thinking": True})
    message = answer["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] != ""
    assert message["content"] == ""
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 12
    # Closing the block by force leaves room for the answer.
    close = chat(http, chat_template_kwargs={"enable_thinking": True}, logit_bias={"509": 100}, max_tokens=3)
    assert close["usage"]["completion_tokens_details"]["reasoning_tokens"] == 1


def test_completions_of_text_lists_and_ids(http: httpx.Client, api: openai.OpenAI) -> None:
    one = api.completions.create(model=MODEL, prompt="Hello", max_tokens=8, temperature=0, logprobs=2)
    many = api.completions.create(model=MODEL, prompt=["Hello", "World"], max_tokens=8, temperature=0)
    assert many.choices[0].text == one.choices[0].text
    assert [choice.index for choice in many.choices] == [0, 1]
    tokens = http.post("/tokenize", json={"prompt": "Hello"}).json()
    by_id = api.completions.create(model=MODEL, prompt=tokens["tokens"], max_tokens=8, temperature=0)
    assert by_id.choices[0].text == one.choices[0].text
    assert tokens["max_model_len"] == 32_768
    logprobs = one.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert "".join(logprobs.tokens) == one.choices[0].text
    streamed = api.completions.create(model=MODEL, prompt="Hello", max_tokens=8, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == one.choices[0].text
    echoed = api.completions.create(model=MODEL, prompt="Hello", max_tokens=2, temperature=0, echo=True)
    assert echoed.choices[0].text.startswith("Hello")


def picture(width: int, height: int, mode: str = "RGB", kind: str = "PNG") -> dict[str, Any]:
    image = Image.linear_gradient("L").resize((width, height)).convert(mode)
    data = io.BytesIO()
    image.save(data, kind)
    url = f"data:image/{kind.lower()};base64,{base64.b64encode(data.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def test_images(http: httpx.Client) -> None:
    def ask(*parts: dict[str, Any]) -> dict[str, Any]:
        content = [*parts, {"type": "text", "text": "What is it?"}]
        return chat(http, messages=[{"role": "user", "content": content}], temperature=0)

    small = ask(picture(64, 64))
    assert small["usage"]["prompt_tokens"] - ask()["usage"]["prompt_tokens"] == 64 + 2
    both = ask(picture(320, 256), picture(64, 64, "LA"))
    assert both["usage"]["prompt_tokens"] - ask()["usage"]["prompt_tokens"] == 80 + 64 + 4
    assert text_of(ask(picture(64, 64))) == text_of(small)


def test_tool_calls_are_parsed(http: httpx.Client) -> None:
    parameters = {
        "type": "object",
        "properties": {
            "n": {"type": "integer", "minimum": 0, "maximum": 9},
            "s": {"enum": ["a", "b"], "type": "string"},
        },
        "required": ["n", "s"],
    }
    tools = [{"type": "function", "function": {"name": "pick", "parameters": parameters}}]
    named = {"type": "function", "function": {"name": "pick"}}
    options = {"tools": tools, "max_tokens": 400, "parallel_tool_calls": False, "seed": 1}
    for choice, reason in (("required", "tool_calls"), (named, "stop")):
        answer = chat(http, tool_choice=choice, **options)
        assert answer["choices"][0]["finish_reason"] == reason
        message = answer["choices"][0]["message"]
        assert message["content"] is None
        (call,) = message["tool_calls"]
        arguments = json.loads(call["function"]["arguments"])
        assert isinstance(arguments["n"], int)
        assert arguments["s"] in ("a", "b")
    body = {"messages": HELLO, "stream": True, "tool_choice": named, **options}
    with http.stream("POST", "/v1/chat/completions", json=body) as streamed:
        lines = [line[6:] for line in streamed.iter_lines() if line.startswith("data: {")]
    deltas = [json.loads(line)["choices"][0]["delta"] for line in lines]
    (calls,) = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    assert json.loads(calls[0]["function"]["arguments"]) == arguments
    assert calls[0]["index"] == 0


ODD_PROPERTIES = {"properties": [1]}


# -- refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"temperature": 3}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 3}, "n"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"512": 1}}, "logit_bias"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "boss", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [FAR_IMAGE]}]}, "messages"),
        ({"messages": [{"role": "user", "content": "<|image_pad|>"}]}, "messages"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": BAD_SCHEMA}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "retrieval"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": 5}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": "x"}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": ODD_PROPERTIES}}]}, "tools"),
        ({"tool_choice": {"type": "function", "function": "f"}}, "tool_choice"),
        ({"tool_choice": {}}, "tool_choice"),
        ({"stop_token_ids": [512]}, "stop_token_ids"),
        ({"stream_options": {"include_usage": True}}, None),
    ],
)  # fmt: skip
def test_bad_parameters(http: httpx.Client, body: dict[str, Any], param: str | None) -> None:
    status, error = refusal(http, **body)
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)


@pytest.mark.parametrize(
    "text", ["\\ud800", "a\\udfffb", "\\ud83d\\ude00", "\\ude00\\ud83d", "\\u0000", "\\u2028"]
)
def test_any_string_of_json_is_answered(http: httpx.Client, text: str) -> None:
    chat_body = (
        f'{{"messages": [{{"role": "user", "content": "{text}"}}], "max_tokens": 1, "stop": "{text}"}}'
    )
    text_body = f'{{"prompt": "{text}", "max_tokens": 1, "echo": true}}'
    headers = {"content-type": "application/json"}
    for path, body in (("/v1/chat/completions", chat_body), ("/v1/completions", text_body)):
        answer = http.post(path, content=body, headers=headers)
        assert answer.status_code == 200, answer.text
    unknown = http.post(path, content=f'{{"model": "{text}", "prompt": "x"}}', headers=headers)
    assert unknown.status_code == 404


def test_other_refusals(http: httpx.Client, server: Any) -> None:
    assert refusal(http, model="gpt-9")[0] == 404
    assert refusal(http, model="gpt-9")[1]["code"] == "model_not_found"
    status, error = refusal(http, messages=[{"role": "user", "content": "x" * 33_000}])
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "messages")
    assert "32768" in error["message"]
    for raw in (b"{", b"[]", b'{"messages": NaN}', b"\xff"):
        answer = http.post("/v1/chat/completions", content=raw, headers={"content-type": "application/json"})
        assert answer.status_code == 400
    assert (
        http.post("/v1/completions", content=b"x", headers={"content-type": "text/plain"}).status_code == 415
    )
    assert http.get("/nowhere").json()["error"]["code"] == "not_found"
    assert http.get("/v1/chat/completions").status_code == 405
    assert refusal(http, "/v1/completions", prompt=[9999])[0] == 400
    nothing_left = {str(token): -100 for token in range(512)}
    assert chat(http, logit_bias=nothing_left)["usage"]["completion_tokens"] == 12


def test_null_means_default_and_unknown_fields_are_ignored(http: httpx.Client) -> None:
    chat(http, temperature=None, stop=None, n=None, tools=None, response_format=None, whatever=1)


def test_models_and_operations(http: httpx.Client) -> None:
    (model,) = http.get("/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == (MODEL, 32_768)
    assert http.get(f"/v1/models/{MODEL}").json()["id"] == MODEL
    assert http.get("/v1/models/other").status_code == 404
    assert http.get("/v1/triplex/overrides").json() == []
    capacity = http.get("/v1/triplex/capacity").json()
    need = (
        -(-capacity["max_model_len"] // capacity["tokens_per_block"]) + capacity["fixed_blocks_per_request"]
    )
    assert need * capacity["max_num_seqs"] == capacity["num_blocks"]
    for path in ("/livez", "/readyz", "/health"):
        report = http.get(path)
        assert (report.status_code, report.json()["state"], report.json()["reasons"]) == (200, "ready", [])
    assert http.get("/livez", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    assert http.get("/livez", headers={"x-request-id": "a b"}).headers["x-request-id"] != "a b"


def test_metrics_count(server: Any, http: httpx.Client) -> None:
    before = (
        server.metric("ple_inference_generation_tokens_total"),
        server.metric("ple_inference_table_lookups_total"),
    )
    chat(http, max_tokens=7, min_tokens=7)
    after = (
        server.metric("ple_inference_generation_tokens_total"),
        server.metric("ple_inference_table_lookups_total"),
    )
    assert after[0] - before[0] == 7
    # One lookup for the prompt and one for each token but the last.
    assert after[1] - before[1] == 7
    assert server.metric("ple_inference_table_prefetches_sent_total") > 0
    assert server.metric("ple_inference_time_to_first_token_seconds_count") > 0


# -- cancellation and queue ------------------------------------------------------------------------------


def hang_up(server: Any, body: dict[str, Any]) -> socket.socket:
    """Send a request on a socket that the caller closes."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=20)
    raw = json.dumps(body).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    connection.sendall(f"{head}content-length: {len(raw)}\r\n\r\n".encode() + raw)
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_frees_its_place(server: Any, stream: bool) -> None:
    body = {"messages": HELLO, "max_tokens": 30_000, "ignore_eos": True, "stream": stream}
    gone = server.metric('ple_inference_requests_total{outcome="cancelled"}')
    connection = hang_up(server, body)
    until(lambda: server.metric("ple_inference_sequences_running") == 1, "running")
    connection.close()
    until(lambda: server.metric("ple_inference_sequences_running") == 0, "freed", 5)
    until(lambda: server.metric('ple_inference_requests_total{outcome="cancelled"}') == gone + 1, "counted")


def test_a_full_queue_refuses_and_recovers(server: Any, http: httpx.Client) -> None:
    body = {"messages": HELLO, "max_tokens": 30_000, "ignore_eos": True}
    with ExitStack() as connections:
        for _ in range(5):
            connections.enter_context(hang_up(server, body))
        until(lambda: server.metric("ple_inference_sequences_running") == 2, "two run")
        until(lambda: server.metric("ple_inference_sequences_waiting") == 3, "three wait")
        answer = http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "overloaded"
        assert 0 < int(answer.headers["retry-after"]) <= 120
    until(lambda: server.metric("ple_inference_sequences_waiting") == 0, "queue is empty")
    chat(http)
