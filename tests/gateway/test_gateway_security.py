"""Strangers, browsers and slow or broken clients."""

import hashlib
import json
import logging
import re
import socket
import threading
import time
from contextlib import ExitStack, suppress

import pytest
from fake_engine import DONE, Call, answer, chunk, complete, play, wait_for, waiting_for
from hypothesis import given
from hypothesis import strategies as st
from raw_socket import read_to

from ple_gateway.__main__ import main
from ple_gateway.keys import find_key, new_key, parse_keys
from ple_gateway.scheduler import Lane
from ple_gateway.settings import SettingsError, load_settings

MARKER = "PRIVATE-MARKER"


def read_all(sock: socket.socket) -> bytes:
    received = b""
    while data := sock.recv(65536):
        received += data
    return received


def test_keys_are_known_by_their_hash(start_gateway, tmp_path):
    key, entry = new_key()
    file = tmp_path / "keys"
    file.write_text(f"{entry} background\nplain\n")
    gateway = start_gateway(api_keys_file=file)
    for good in (key, "plain"):
        assert gateway.request("GET", "/v1/models", headers={"authorization": f"Bearer {good}"}).status == 200
    for bad in (entry, key[:-1], entry.removeprefix("sha256:")):
        assert gateway.request("GET", "/v1/models", headers={"authorization": f"Bearer {bad}"}).status == 401


@given(st.lists(st.from_regex(r"[!-+\--~]{1,40}", fullmatch=True), min_size=1, unique=True))
def test_every_key_is_found_and_no_other(keys):
    known = parse_keys("\n".join(f"sha256:{hashlib.sha256(key.encode()).hexdigest()}" for key in keys))
    for index, key in enumerate(keys):
        assert find_key(known, key) == known[index]
    assert find_key(known, "".join(keys) + "x") is None


def test_keys_carry_lanes():
    plain, hashed = parse_keys(f"a background, sha256:{'0' * 64}  interactive\n")
    assert (plain.lane, hashed.lane, hashed.digest) == (Lane.BACKGROUND, Lane.INTERACTIVE, bytes(32))
    assert (plain.name, hashed.name) == ("key1", "key2")


def test_keys_of_a_file_from_windows(tmp_path):
    file = tmp_path / "keys"
    file.write_bytes(b"\xef\xbb\xbffirst\r\nsecond background\r\n")
    keys = load_settings({}, {"api_keys_file": file}).keys()
    assert [find_key(keys, key) for key in ("first", "second")] == list(keys)


@pytest.mark.parametrize(
    "entry", ["sha256:short", "sha256:" + "g" * 64, "SECRET urgent", "# SECRET", "#SECRET", "SECR\u00c9T"]
)
def test_mistakes_in_keys_are_named_without_the_key(entry):
    with pytest.raises(SettingsError, match="API key 1") as caught:
        load_settings({}, {"api_keys": entry})
    assert "SECRET" not in str(caught.value)


def test_key_command_prints_a_key_and_its_hash(capsys):
    assert main(["key"]) == 0
    client, entry = (line.partition(":")[2].strip() for line in capsys.readouterr().out.splitlines())
    assert find_key(parse_keys(entry), client)
    assert len(client) > 40


def test_browsers_are_kept_out_by_default(start_gateway):
    gateway = start_gateway(api_keys="k")
    origin = {"origin": "https://chat.example", "access-control-request-method": "POST"}
    refused = gateway.request("OPTIONS", "/v1/chat/completions", headers=origin)
    assert (refused.status, refused.error["code"]) == (403, "origin_not_allowed")
    assert not [name for name in refused.headers if name.startswith("access-control")]
    plain = gateway.request("GET", "/livez", headers=origin)
    assert not [name for name in plain.headers if name.startswith("access-control")]


def test_listed_origins_may_read_answers_and_errors(start_gateway):
    gateway = start_gateway(api_keys="k", cors_origins="https://chat.example, http://localhost:3000")
    origin = {"origin": "http://localhost:3000"}
    asked = {
        **origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    preflight = gateway.request("OPTIONS", "/v1/chat/completions", headers=asked)
    assert preflight.status == 204, "no key is asked for"
    assert preflight.headers["access-control-allow-origin"] == "http://localhost:3000"
    assert preflight.headers["access-control-allow-headers"] == "authorization,content-type"
    assert "x-request-id" in preflight.headers
    refused = gateway.request("GET", "/v1/models", headers=origin)
    assert refused.status == 401
    assert refused.headers["access-control-allow-origin"] == "http://localhost:3000"
    assert "origin" in refused.headers["vary"].lower()
    other = gateway.request("GET", "/v1/models", headers={"origin": "https://chat.example.evil"})
    assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize("origins", ["chat.example", "https://chat.example/", "https://a b"])
def test_origins_are_checked(origins):
    with pytest.raises(SettingsError, match="origin"):
        load_settings({}, {"cors_origins": origins})


@pytest.mark.parametrize("begin", [b"", b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-slow: "])
def test_head_that_trickles_in_is_cut_off(start_gateway, begin):
    gateway = start_gateway(head_timeout_s=0.3)
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=5) as sock:
        sock.sendall(begin)
        began_s = time.monotonic()
        while b"408 Request Timeout" not in (received := sock.recv(65536, socket.MSG_PEEK)):
            assert received == b""
            assert time.monotonic() - began_s < 5
        assert (
            json.loads(read_all(sock).partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"
        )


def test_second_head_on_a_connection_has_the_same_limit(start_gateway):
    gateway = start_gateway(head_timeout_s=0.3)
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=5) as sock:
        sock.sendall(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"200 OK" in read_to(sock, b"}}")
        time.sleep(0.4)  # an idle connection is no slow one
        sock.sendall(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"200 OK" in read_to(sock, b"}}")
        sock.sendall(b"GET /livez HT")
        assert b"408 Request Timeout" in read_all(sock)


def test_slow_second_head_does_not_cut_the_first_answer(start_gateway, engine):
    gateway = start_gateway(head_timeout_s=0.2)
    gateway.wait_ready()
    body = b'{"messages": [{"role": "user", "content": "hi"}], "stream": true}'
    with gateway.open_chat(stream=True) as sock:
        received = b""
        while DONE not in received:
            received += sock.recv(65536)
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
        sock.sendall(head + body)
        assert b"200 OK" in sock.recv(65536)


def test_head_that_never_ends_is_cut_off(start_gateway):
    gateway = start_gateway()
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=5) as sock:
        sock.sendall(b"GET /livez HTTP/1.1\r\nx: " + b"a" * 100_000)
        assert b"431 Request Header Fields Too Large" in sock.recv(65536)


CHUNKED = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


@pytest.mark.parametrize(
    ("begin", "more"),
    [
        (b"2\r\n{}\r\n0\r\n", b"x-a: b\r\n" * 100),
        (b"2\r\n{}\r\n0\r\nx-a: ", b"a" * 1000),
        (b"1;", b"a" * 1000),
    ],
    ids=["trailers", "one trailer", "chunk extension"],
)
def test_what_is_no_body_and_never_ends_is_cut_off(gateway, begin, more):
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=5) as sock:
        sock.sendall(CHUNKED + begin)
        with pytest.raises(ConnectionError):
            sock.sendall(more * 20_000)


def test_trailers_are_no_headers(gateway, engine):
    body = b'{"messages": [{"role": "user", "content": "hi"}]}'
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=5) as sock:
        sock.sendall(CHUNKED + b"%x\r\n%s\r\n0\r\nx-priority: background\r\n\r\n" % (len(body), body))
        assert read_to(sock, b"}}").startswith(b"HTTP/1.1 200 ")
        sock.sendall(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
        assert read_to(sock, b"}}").startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("name", [b"Upgrade", b"upgrade"])
def test_offer_of_another_protocol_is_passed_over(gateway, engine, name):
    """Java's HTTP client offers HTTP/2 with every request."""
    body = b'{"messages": [{"role": "user", "content": "Upgrade: me"}]}'
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nconnection: Upgrade, HTTP2-Settings\r\nhost: x\r\n%s: h2c\r\n"
        b"http2-settings: AAEAAEAAAAIAAAAB\r\ncontent-length: %d\r\n\r\n" % (name, len(body))
    )
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=5) as sock:
        for _ in range(2):
            sock.sendall(head + body)
            assert read_to(sock, b"}}").startswith(b"HTTP/1.1 200 ")
    assert [call.request["messages"][0]["content"] for call in engine.calls] == ["Upgrade: me"] * 2


def test_count_of_retries_may_have_any_length(gateway):
    said = {"messages": [{"role": "user", "content": "hi"}]}
    headers = {"x-stainless-retry-count": "1" * 5000}
    assert gateway.request("POST", "/v1/chat/completions", said, headers=headers).status == 200


def test_slow_bodies_of_one_key_leave_room_for_others(start_gateway):
    gateway = start_gateway(
        api_keys="slow,other", max_in_flight=4, max_queued=4, max_in_flight_per_key=2, max_queued_per_key=1
    )
    address = ("127.0.0.1", gateway.port)
    head = CHUNKED.replace(b"host: x", b"host: x\r\nauthorization: Bearer slow")
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(socket.create_connection(address, timeout=5)).sendall(head)
        last = stack.enter_context(socket.create_connection(address, timeout=5))
        wait_for(lambda: gateway.gateway.gate.tickets == 3, "three bodies are being read")
        last.sendall(head)
        assert last.recv(65536).startswith(b"HTTP/1.1 429 ")
        said = {"messages": [{"role": "user", "content": "hi"}]}
        answer = gateway.request("POST", "/v1/chat/completions", said, {"authorization": "Bearer other"})
        assert answer.status == 200


def test_answer_that_nobody_reads_is_dropped(start_gateway, engine, monkeypatch):
    monkeypatch.setattr("ple_gateway.connection._UNREAD_MS", 300)
    gateway = start_gateway(keepalive_interval_s=0)
    engine.script = complete("x" * 20_000_000)
    with gateway.open_chat():
        wait_for(lambda: engine.calls, "the engine is asked")
        wait_for(lambda: gateway.gateway.gate.idle, "the answer is written")
        wait_for(lambda: not gateway.server.server_state.connections, "the connection is given up")


def test_connections_are_bounded(start_gateway):
    gateway = start_gateway(max_connections=5)
    with ExitStack() as stack:
        for _ in range(5):
            stack.enter_context(socket.create_connection(("127.0.0.1", gateway.port)))
        wait_for(lambda: len(gateway.server.server_state.connections) == 5, "they are open")
        more = stack.enter_context(socket.create_connection(("127.0.0.1", gateway.port), timeout=5))
        with suppress(ConnectionError):
            assert more.recv(1) == b""
    wait_for(lambda: not gateway.server.server_state.connections, "they are gone")
    assert gateway.request("GET", "/livez").status == 200


def test_malformed_http_is_a_400(gateway):
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=5) as sock:
        sock.sendall(b"\x16\x03\x01 this is TLS\r\n\r\n")
        assert read_all(sock).startswith(b"HTTP/1.1 400 ")


def test_garbage_behind_a_request_does_not_get_into_its_answer(gateway, engine):
    go_on = threading.Event()
    engine.script = play(chunk({"content": "some"}), waiting_for(go_on), Call.reset)
    with gateway.open_chat(stream=True) as sock:
        assert read_to(sock, b"some").startswith(b"HTTP/1.1 200 ")
        sock.sendall(b"no HTTP")
        rest = read_all(sock)
        go_on.set()
    assert b"HTTP/1.1" not in rest


@pytest.mark.parametrize("path", ["/invocations", "/v1/triplex/overrides", "/tokenizer_info", "/load"])
def test_g57_only_what_is_listed_is_served(gateway, engine, path):
    for method in ("GET", "POST"):
        assert gateway.request(method, path, b"{}").status == 404
    assert not engine.calls


def test_g57_whatever_reaches_the_engine_needs_a_key(start_gateway, engine):
    gateway = start_gateway(api_keys="k", metrics_key="always")
    said = {"messages": [{"role": "user", "content": "hi"}]}
    paths = ("chat/completions", "completions", "responses", "messages", "messages/count_tokens")
    for path in (*(f"/v1/{path}" for path in paths), "/tokenize"):
        assert gateway.request("POST", path, said).status == 401
    for path in ("/metrics", "/status.json", "/v1/models", "/v1/models/triplex-tiny"):
        assert gateway.request("GET", path).status == 401
    assert not engine.calls


@pytest.mark.parametrize(
    "fields",
    [
        {"chat_template": "{{ x }}" * 17},
        {"chat_template_kwargs": {"chat_template": "{% for x in range(10**9) %}{% endfor %}"}},
    ],
)
def test_g58_chat_templates_of_clients_are_refused(gateway, engine, fields):
    refused = gateway.chat(**fields)
    assert refused.status == 400
    assert "chat_template" in refused.error["param"]
    assert not engine.calls


def test_g58_none_of_it_reaches_the_engine(gateway, engine):
    gateway.chat()
    assert "chat_template" not in engine.calls[-1].body.decode()


@pytest.mark.parametrize(
    "messages",
    [[{"role": "user", "content": "x"}] * 100_000, [{"role": "user", "content": ["x"] * 100_000}]],
    ids=["messages", "parts"],
)
def test_100k_messages_or_parts_are_refused_and_stall_nobody(gateway, engine, messages):
    delays_s = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            began_s = time.monotonic()
            gateway.request("GET", "/livez")
            delays_s.append(time.monotonic() - began_s)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        refused = gateway.request("POST", "/v1/chat/completions", {"messages": messages})
    finally:
        done.set()
        watcher.join(10)
    assert (refused.status, refused.error["param"]) == (400, "messages")
    assert "more than 10000" in refused.error["message"]
    assert max(delays_s) < 1
    assert not engine.calls


def test_long_history_of_an_agent_is_served(gateway, engine):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert gateway.chat(messages=turns * 1000).status == 200
    assert len(engine.calls[-1].request["messages"]) == 2000


def test_no_prompt_text_is_logged(start_gateway, engine, caplog):
    caplog.set_level(logging.DEBUG)
    gateway = start_gateway(first_token_timeout_s=0.2, commit_delay_s=0.1, api_keys=f"sk-{MARKER}")
    said = {"messages": [{"role": "user", "content": MARKER}]}
    headers = {"authorization": f"Bearer sk-{MARKER}"}
    path = "/v1/chat/completions"
    wait_for(lambda: gateway.request("GET", "/readyz").status == 200, "it is ready")
    bodies = [
        {**said, "temperature": MARKER},
        {**said, "stream": True},
        {**said, "unknown_field": MARKER},
        {"messages": [{"role": MARKER, "content": MARKER}]},
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": f"data:{MARKER}"}}]}
            ]
        },
        {**said, "model": MARKER},
        {
            **said,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {"type": MARKER}},
            },
        },
        {**said, "response_format": {"type": "json_object"}},
        MARKER,
    ]
    scripts = [
        complete(MARKER),
        answer(400, {"error": {"message": MARKER, "code": 400}}),
        answer(500, {"error": {"message": MARKER, "code": 500}}),
        answer(503, MARKER.encode(), "text/plain"),
        answer(200, MARKER.encode()),
        lambda call: call.reset(),
        play(MARKER.encode(), DONE),
        play({"error": {"message": MARKER}}, DONE),
        play(lambda call: call.wait_closed()),
    ]
    for script in scripts:
        engine.script = script
        gateway.request("POST", path, {**said, "stream": True}, headers)
    engine.script = complete(MARKER)
    for body in bodies:
        gateway.request("POST", path, body, headers)
    gateway.request("POST", path, b'{"a": ' + MARKER.encode(), headers)
    gateway.request("POST", f"/{MARKER}?x={MARKER}", said, {**headers, "x-request-id": f"{MARKER} {MARKER}"})
    engine.script = lambda call: call.wait_closed()
    with gateway.open_chat(messages=said["messages"]):
        pass
    gateway.request("POST", path, said, {"authorization": f"Bearer {MARKER}"})
    assert "request done" in caplog.text
    assert MARKER not in caplog.text
    assert not re.search(r"sk-\w", caplog.text)
