"""The daemon goes and comes back; inference stops and drains."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

LENGTH = 120
BODY = {
    "messages": [{"role": "user", "content": "Tell a long story."}],
    "max_tokens": LENGTH,
    "min_tokens": LENGTH,
    "temperature": 0,
    "logprobs": True,
}


@pytest.fixture
def daemon(tiny_checkpoint: Path, daemon_of: Callable) -> Any:
    """The shared server's daemon; a test that kills it starts it again."""
    return daemon_of(tiny_checkpoint)


def until(condition: Callable[[], object], what: str, deadline_s: float = 30) -> None:
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def tokens_of(answer: httpx.Response) -> list[str]:
    assert answer.status_code == 200, answer.text
    return [entry["token"] for entry in answer.json()["choices"][0]["logprobs"]["content"]]


def test_tokens_are_the_same_across_restarts_of_the_daemon(server: Any, daemon: Any) -> None:
    with server.client() as http:
        undisturbed = tokens_of(http.post("/v1/chat/completions", json=BODY))
        result: list[httpx.Response] = []

        def ask() -> None:
            result.append(http.post("/v1/chat/completions", json=BODY, timeout=120))

        asking = threading.Thread(target=ask)
        asking.start()
        for _ in range(3):
            made = server.metric("ple_inference_table_lookups_total")
            until(lambda made=made: server.metric("ple_inference_table_lookups_total") > made, "progress")
            daemon.kill()
            until(lambda: "waiting_for_table" in _health(server)["reasons"], "waiting is told")
            assert _health(server)["state"] == "degraded"
            daemon.start()
        asking.join(120)
        assert tokens_of(result[0]) == undisturbed
    assert server.metric("ple_inference_table_reconnects_total") >= 3
    assert server.metric("ple_inference_table_lookups_failed_total") == 0
    until(lambda: _health(server)["state"] == "ready", "healthy again")


def _health(server: Any) -> dict[str, Any]:
    return httpx.get(f"{server.url}/readyz", timeout=10).json()


def test_hanging_up_while_the_table_is_away_frees_the_place(server: Any, daemon: Any) -> None:
    daemon.kill()
    with (
        server.client() as http,
        http.stream("POST", "/v1/chat/completions", json={**BODY, "stream": True}) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        until(lambda: "waiting_for_table" in _health(server)["reasons"], "waiting")
    until(lambda: server.metric("ple_inference_sequences_running") == 0, "freed", 10)
    daemon.start()
    daemon.wait_ready()
    with server.client() as http:
        assert len(tokens_of(http.post("/v1/chat/completions", json=BODY))) == LENGTH


def test_a_whole_life(
    tiny_checkpoint: Path, start_server: Callable, start_daemon: Callable, tmp_path: Path
) -> None:
    """Up without a daemon, ready with it, requests fail where it stays away, work again, drain, gone."""
    with start_daemon(tiny_checkpoint) as daemon:
        daemon.kill()
        log = tmp_path / "log"
        with start_server(tiny_checkpoint, daemon.address, log, wait=False, lookup_deadline_s=2) as server:
            until(lambda: server.url, "listening", 60)
            _check_starting(server)
            daemon.start()
            until(server.ready, "ready", 60)
            with server.client() as http:
                daemon.kill()
                _check_table_away(http)
                daemon.start()
                daemon.wait_ready()
                assert len(tokens_of(http.post("/v1/chat/completions", json=BODY))) == LENGTH
                _drain(server, http)


def _check_starting(server: Any) -> None:
    assert httpx.get(f"{server.url}/livez", timeout=10).status_code == 200
    assert httpx.get(f"{server.url}/readyz", timeout=10).status_code == 503
    assert _health(server)["state"] == "starting"
    refused = httpx.post(f"{server.url}/v1/chat/completions", json=BODY, timeout=10)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
    until(lambda: "waiting for the table daemon" in server.log.read_text(), "says so", 60)


def _check_table_away(http: httpx.Client) -> None:
    whole = http.post("/v1/chat/completions", json=BODY)
    assert (whole.status_code, whole.json()["error"]["code"]) == (503, "table_unavailable")
    with http.stream("POST", "/v1/chat/completions", json={**BODY, "stream": True}) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == "table_unavailable"
    assert lines[-1] == "data: [DONE]"


def _drain(server: Any, http: httpx.Client) -> None:
    """SIGTERM: the running answer is finished, new ones are refused, the exit status is 0."""
    body = {**BODY, "stream": True}
    with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: _health(server)["state"] == "stopping", "stopping")
        assert httpx.get(f"{server.url}/readyz", timeout=10).status_code == 503
        late = httpx.post(f"{server.url}/v1/chat/completions", json=BODY, timeout=10)
        assert late.status_code == 503
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert sum('"content"' in line for line in rest) > LENGTH / 2
    assert server.process.wait(20) == 0
