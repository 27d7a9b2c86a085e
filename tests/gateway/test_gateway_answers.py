"""Answers in one piece, errors of the engine, models, tokenize, health."""

import json
import re

import pytest
from fake_engine import FakeEngine, answer, complete, message, wait_for


def test_answer_passes(gateway, engine):
    engine.script = complete("hello")
    answered = gateway.chat()
    assert answered.status == 200
    assert answered.json == message("hello")
    assert answered.headers["content-type"] == "application/json"
    assert answered.headers["openai-processing-ms"].isdigit()


def test_text_completion_passes(gateway, engine):
    choice = {"index": 0, "text": "abc", "finish_reason": "stop", "logprobs": None}
    engine.script = answer(200, {"id": "cmpl-1", "object": "text_completion", "choices": [choice]})
    answered = gateway.request("POST", "/v1/completions", {"prompt": [1, 2, 3], "model": "triplex-tiny"})
    assert answered.json["choices"][0]["text"] == "abc"
    assert engine.calls[-1].path == "/v1/completions"
    assert engine.calls[-1].request["prompt"] == [1, 2, 3]


def test_request_ids(gateway, engine):
    kept = gateway.request("GET", "/v1/models", headers={"x-request-id": "abc-1.2_3"})
    assert kept.headers["x-request-id"] == "abc-1.2_3"
    for bad in ("a b", "x" * 129, "ü".encode().decode("latin-1")):
        replaced = gateway.request("GET", "/v1/models", headers={"x-request-id": bad}).headers["x-request-id"]
        assert re.fullmatch(r"[A-Za-z0-9._-]{1,128}", replaced)
        assert replaced != bad
    answered = gateway.chat()
    assert engine.calls[-1].headers["x-request-id"] == answered.headers["x-request-id"]


@pytest.mark.parametrize(
    ("status", "body", "kind", "expected"),
    [
        (
            400,
            {"error": {"message": "bad", "type": "BadRequestError", "code": 400}},
            "json",
            (400, None, None),
        ),
        (401, {"error": "Unauthorized"}, "json", (502, "backend_unavailable", None)),
        (
            404,
            {"error": {"message": "The model `x` does not exist.", "param": "model", "code": 404}},
            "json",
            (404, "model_not_found", "model"),
        ),
        (404, {"detail": "Not Found"}, "json", (502, "backend_unavailable", None)),
        (422, {"detail": [{"loc": ["body", "n"], "msg": "too large"}]}, "json", (400, None, None)),
        (
            400,
            {"error": {"message": "maximum context length is 8 tokens", "param": "input_text", "code": 400}},
            "json",
            (400, "context_length_exceeded", "messages"),
        ),
        (413, b"too large", "plain", (413, "request_too_large", None)),
        (429, {"message": "slow down"}, "json", (429, "rate_limit_exceeded", None)),
        (500, b"<html><body><h1>Internal error</h1></body></html>", "html", (500, None, None)),
        (500, b"", "plain", (500, None, None)),
        (501, {"error": {"message": "only base64", "code": 501}}, "json", (400, None, None)),
        (502, b"bad gateway", "plain", (502, "backend_unavailable", None)),
        (503, b"", "plain", (503, "overloaded", None)),
        (504, b"", "plain", (504, "timeout", None)),
        (400, b"[[[[", "json", (400, None, None)),
        (400, {"error": {"message": "", "code": 400}}, "json", (400, None, None)),
    ],
)
def test_errors_of_the_engine_get_openai_shape(gateway, engine, status, body, kind, expected):
    engine.script = answer(
        status, body, {"json": "application/json", "html": "text/html", "plain": "text/plain"}[kind]
    )
    answered = gateway.chat()
    assert (answered.status, answered.error["code"], answered.error["param"]) == expected
    assert "<" not in answered.error["message"]
    if answered.status >= 500:
        assert answered.error["type"] == "server_error"
    if answered.status in {429, 503}:
        assert 1 <= int(answered.headers["retry-after"]) <= 120


def test_retry_after_of_the_engine_is_capped(gateway, engine):
    engine.script = answer(503, {}, extra="retry-after: 3600\r\n")
    assert gateway.chat().headers["retry-after"] == "120"


def test_answer_that_is_no_answer(gateway, engine):
    for body in (b"no json", {"object": "list"}, {"error": {"message": "died", "code": 500}}):
        engine.script = answer(200, body)
        assert gateway.chat().error["type"] == "server_error"


def test_empty_answer_is_asked_for_once_more(gateway, engine):
    answers = iter([message(""), message("second")])
    engine.script = lambda call: call.answer(200, next(answers))
    assert gateway.chat().json["choices"][0]["message"]["content"] == "second"
    assert len(engine.calls) == 2
    engine.script = answer(200, message(None))
    answered = gateway.chat()
    assert (answered.status, answered.error["code"]) == (502, "empty_answer")
    assert len(engine.calls) == 4


def test_calls_reasoning_and_cut_answers_are_not_empty(gateway, engine):
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for body in (
        message(None, "tool_calls", tool_calls=[call]),
        message(None, "length"),
        message(None, "stop", reasoning="thought"),
    ):
        engine.script = answer(200, body)
        assert gateway.chat().status == 200
    assert gateway.chat().json["choices"][0]["message"]["reasoning_content"] == "thought"


def test_models_survive_the_engine(start_gateway):
    engine = FakeEngine()
    gateway = start_gateway(engine=engine, hold_timeout_s=0)
    gateway.wait_ready()
    listed = gateway.request("GET", "/v1/models").json
    assert listed["data"][0]["max_model_len"] == 32768
    assert gateway.request("GET", "/v1/models/triplex-tiny").json["id"] == "triplex-tiny"
    missing = gateway.request("GET", "/v1/models/a/b")
    assert (missing.status, missing.error["code"], missing.error["param"]) == (
        404,
        "model_not_found",
        "model",
    )
    engine.close()
    wait_for(lambda: gateway.request("GET", "/readyz").status == 503, "the engine's end is seen")
    gateway.gateway.models._fetched_s = 0.0
    assert gateway.request("GET", "/v1/models").json == listed
    assert gateway.request("GET", "/livez").status == 200
    refused = gateway.chat()
    assert (refused.status, refused.error["code"]) == (503, "backend_unavailable")
    assert 1 <= int(refused.headers["retry-after"]) <= 120
    assert gateway.chat(stream=True).status == 503


def test_engine_that_comes_late(start_gateway):
    engine = FakeEngine()
    port = engine.port
    engine.close()
    gateway = start_gateway(engine=engine)
    ready = gateway.request("GET", "/readyz")
    assert ready.status == 503
    assert ready.json["state"] == "starting"
    assert ready.json["reasons"]
    assert gateway.request("GET", "/v1/models").status == 503
    late = FakeEngine(port)
    try:
        gateway.wait_ready()
        assert gateway.request("GET", "/health").json["state"] == "ready"
        assert gateway.chat().status == 200
    finally:
        late.close()


def test_table_that_is_awaited_degrades(gateway, engine):
    engine.ready_body = {"state": "degraded", "reasons": ["waiting_for_table"]}
    health = wait_for(
        lambda: (h := gateway.request("GET", "/readyz")).json["state"] == "degraded" and h,
        "the reason is seen",
    )
    assert health.status == 200
    assert health.json["reasons"] == ["engine: waiting_for_table"]
    assert health.json["dependencies"]["table"] == "down"


def test_unknown_model_is_refused_before_the_engine(gateway, engine):
    answered = gateway.chat(model="gpt-9")
    assert (answered.status, answered.error["code"], answered.error["param"]) == (
        404,
        "model_not_found",
        "model",
    )
    assert not engine.calls
    assert gateway.chat(model="").status == 200
    assert engine.calls[-1].request["model"] == "triplex-tiny"


def test_tokenize(gateway, engine):
    engine.script = answer(200, {"count": 2, "tokens": [1, 2]})
    assert gateway.request("POST", "/tokenize", {"prompt": "hi"}).json["count"] == 2
    assert (
        gateway.request("POST", "/tokenize", {"messages": [{"role": "user", "content": "hi"}]}).status == 200
    )
    assert gateway.request("POST", "/tokenize", {"messages": []}).status == 400


def test_nothing_else_is_served(gateway, engine):
    for path in ("/docs", "/v1/embeddings", "/invocations", "/v1/chat/completions/"):
        answered = gateway.request("GET", path)
        assert (answered.status, answered.error["type"]) == (404, "invalid_request_error")
    wrong = gateway.request("GET", "/v1/chat/completions")
    assert wrong.status == 405
    assert wrong.headers["allow"] == "POST"
    assert wrong.error
    assert not engine.calls


def test_metrics_have_bounded_routes(gateway):
    for index in range(5):
        gateway.request("GET", f"/scan/{index}")
    text = gateway.request("GET", "/metrics").body.decode()
    assert 'route="other"' in text
    assert "/scan/" not in text
    assert json.dumps(gateway.request("GET", "/livez").json)
