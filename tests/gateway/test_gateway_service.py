"""The service as an operator meets it: keys, settings, the command line, signals."""

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from fake_engine import Call, chunk, complete, wait_for
from raw_socket import read_to

from ple_gateway.settings import Settings, SettingsError, load_settings

CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("PLE_GATEWAY_")}


def test_keys_guard_everything_but_health(start_gateway, tmp_path):
    file = tmp_path / "keys"
    file.write_text("from-file\n\nsecond\n")
    gateway = start_gateway(api_keys="inline", api_keys_file=file)
    for path in ("/livez", "/readyz", "/health", "/metrics"):
        assert gateway.request("GET", path).status in {200, 503}
    for path in ("/v1/models", "/tokenize", "/nothing"):
        refused = gateway.request("GET", path)
        assert (refused.status, refused.error["code"]) == (401, "invalid_api_key")
        assert refused.headers["www-authenticate"] == "Bearer"
    for value in ("Bearer inline", "bearer from-file", "BEARER  second"):
        assert gateway.request("GET", "/v1/models", headers={"authorization": value}).status == 200
    for value in ("Bearer nope", "Basic inline", "inline", "Bearer ", "Bearer inline2", "Bearer \xfc"):
        assert gateway.request("GET", "/v1/models", headers={"authorization": value}).status == 401


def test_metrics_can_need_a_key(start_gateway):
    gateway = start_gateway(api_keys="k", metrics_key="always")
    assert gateway.request("GET", "/metrics").status == 401


def test_open_only_where_no_stranger_can_reach_it():
    for address in ("0.0.0.0:1", "[::]:1", "10.0.0.1:1", "example.org:1"):
        with pytest.raises(SettingsError, match="no API key"):
            load_settings({}, {"http_address": address})
    for address in ("127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "localhost:1"):
        load_settings({}, {"http_address": address})
    assert load_settings({}, {"http_address": "0.0.0.0:1", "api_keys": "k"}).metrics_need_key()


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"http_address": "8000"}, "http_address"),
        ({"http_address": "127.0.0.1:99999"}, "http_address"),
        ({"engine_url": "127.0.0.1:8100"}, "engine_url"),
        ({"engine_url": "http://u:p@x"}, "credentials"),
        ({"engine_url": "http://x:99999"}, "engine_url"),
        ({"max_body_bytes": "many"}, "max_body_bytes"),
        ({"total_timeout_s": 0}, "total_timeout_s"),
        ({"api_keys": " , "}, "api_keys holds no key; put one in"),
        ({"api_keys_file": "/dev/null"}, "api_keys_file /dev/null holds no key; put one in"),
        ({"api_keys_file": "/proc/nonexistent"}, "cannot be read"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_bad_settings_are_one_line(overrides, named):
    with pytest.raises(SettingsError, match=named) as caught:
        load_settings({}, overrides)
    assert "\n" not in str(caught.value)


def test_every_setting_is_documented():
    text = (Path(__file__).parents[2] / "docs" / "gateway.md").read_text(encoding="utf-8")
    assert [name for name in Settings.model_fields if f"`{name}`" not in text] == []


def test_unknown_variables_are_errors_but_injected_ones_are_not():
    with pytest.raises(SettingsError, match="PLE_GATEWAY_HTTP_ADRESS"):
        load_settings({"PLE_GATEWAY_HTTP_ADRESS": "x"}, {})
    injected = {"PLE_GATEWAY_PORT": "x", "PLE_GATEWAY_PORT_8000_TCP": "x", "PLE_GATEWAY_SERVICE_HOST": "x"}
    load_settings(injected, {})
    assert not [name for name in Settings.model_fields if name.endswith("_port")]


def run(*arguments, **variables):
    return subprocess.run(
        [sys.executable, "-m", "ple_gateway", *arguments],
        env={**CLEAN, **variables},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_help_has_examples():
    for arguments in (["--help"], ["serve", "--help"]):
        shown = run(*arguments)
        assert shown.returncode == 0
        assert "PLE_GATEWAY_API_KEYS_FILE=" in shown.stdout


def test_mistakes_are_one_line_and_a_status():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for failed in (
            run("serve", "--http-address", address),
            run("serve", "--engine-url", "nonsense"),
            run("serve", PLE_GATEWAY_NONSENSE="1"),
            run("serve", PLE_GATEWAY_HTTP_ADDRESS="0.0.0.0:0"),
        ):
            assert failed.returncode != 0
            lines = [line for line in failed.stderr.splitlines() if " INFO " not in line]
            assert len(lines) == 1
            assert lines[0].startswith("ple-gateway: ")


@pytest.fixture
def process(engine):
    """The service as a process; its port, once it says that it listens."""
    running = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "ple_gateway",
            "serve",
            "--http-address",
            "127.0.0.1:0",
            "--engine-url",
            engine.url,
        ],
        env={
            **CLEAN,
            "PLE_GATEWAY_DRAIN_TIMEOUT_S": "1",
            "PLE_GATEWAY_API_KEYS": "topsecret",
            "PLE_GATEWAY_WARM_PROBE": "false",  # it would be a call to the engine's script
        },
        stderr=subprocess.PIPE,
        text=True,
    )
    lines = []
    reader = threading.Thread(target=lambda: lines.extend(running.stderr))
    reader.start()
    try:
        yield running, lines
    finally:
        running.kill()
        running.wait(10)
        reader.join(10)
        running.stderr.close()


def connect(lines, body=b'{"messages": [{"role": "user", "content": "PRIVATE"}], "stream": true}'):
    found = wait_for(lambda: [line for line in lines if "listening url=" in line], "it listens")[0]
    port = int(found.partition("url=http://127.0.0.1:")[2].split()[0])
    sock = socket.create_connection(("127.0.0.1", port), timeout=10)
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer topsecret\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    sock.sendall(head.encode() + body)
    return sock


def test_sigterm_lets_running_requests_end(process, engine):
    running, lines = process
    go_on = threading.Event()

    def script(call: Call) -> None:
        call.open_stream()
        call.event(chunk({"content": "begun"}))
        assert go_on.wait(10)
        call.event(chunk({}, "stop"))
        call.event(b"[DONE]")
        call.end_stream()

    engine.script = script
    with connect(lines) as sock:
        read_to(sock, b"begun")
        running.send_signal(signal.SIGTERM)
        wait_for(lambda: any("stopping drain_s" in line for line in lines), "it drains")
        go_on.set()
        assert b"error" not in read_to(sock, b"[DONE]")
    assert running.wait(10) == 0
    wait_for(lambda: any("request done" in line for line in lines), "the request is logged")
    assert not any("PRIVATE" in line or "topsecret" in line for line in lines)


def test_what_outlives_the_drain_gets_an_error_frame(process, engine):
    running, lines = process

    def script(call: Call) -> None:
        call.open_stream()
        call.event(chunk({"content": "begun"}))
        call.wait_closed()

    engine.script = script
    with connect(lines) as sock:
        read_to(sock, b"begun")
        running.send_signal(signal.SIGTERM)
        assert b"shutting_down" in read_to(sock, b"[DONE]")
    assert running.wait(10) == 0


def test_ctrl_c_ends_it_with_success(process, engine):
    running, lines = process
    engine.script = complete("x")
    with connect(lines) as sock:
        read_to(sock, b"[DONE]")
    running.send_signal(signal.SIGINT)
    assert running.wait(10) == 0
