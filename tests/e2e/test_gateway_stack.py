"""What only the three services together show of the gateway."""

import json
import socket
import struct
import urllib.request

import pytest
from waiting import wait_for

pytestmark = pytest.mark.e2e

MODEL = "triplex-tiny"


def open_stream(url: str, key: str) -> socket.socket:
    """Begin a long stream on a raw socket, and read its first event."""
    host, port = url.removeprefix("http://").split(":")
    said = {"role": "user", "content": "Tell me a long story. " * 20}
    body = json.dumps(
        {"model": MODEL, "messages": [said], "stream": True, "max_tokens": 5000, "ignore_eos": True}
    ).encode()
    sock = socket.create_connection((host, int(port)), timeout=60)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {key}\r\n"
    sock.sendall(
        f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
    )
    received = b""
    while b"data: " not in received:
        data = sock.recv(65536)
        assert data, received
        received += data
    return sock


def test_g31_streams_that_are_reset_leave_nothing_in_any_service(stack, client, metric):
    key = client.api_key
    socks = [open_stream(stack.gateway, key) for _ in range(4)]
    running = "ple_inference_sequences_running"
    wait_for(lambda: metric(stack.inference, running) == 4, "four sequences")
    for sock in socks:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()
    wait_for(lambda: metric(stack.inference, running) == 0, "an idle engine", 10)
    for name in ("prefetch_active", "prefetch_queue"):
        wait_for(lambda n=name: metric(stack.daemon, f"ple_daemon_{n}") == 0, f"no {name}", 10)
    wait_for(lambda: metric(stack.gateway, "ple_gateway_reserved_blocks") == 0, "no blocks set aside", 10)


def test_the_status_page_knows_all_three(stack, client):
    client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hi"}], max_tokens=3)

    def shown() -> dict:
        with urllib.request.urlopen(f"{stack.gateway}/status.json", timeout=10) as response:
            return json.load(response)

    wait_for(lambda: shown()["table"]["cold_reads_per_s"] is not None, "the daemon's figures", 20)
    figures = shown()
    # A drive that others keep busy is "slow" to the daemon, and so degrades all three.
    slow = any("drive_tail" in reason for reason in figures["table"]["reasons"])
    states = [figures[name]["state"] for name in ("gateway", "engine", "table")]
    assert states == ["ready"] * 3 or (slow and set(states) <= {"ready", "degraded"})
    assert figures["table"]["asked"]
    assert figures["blocks"]["budget"] > 0
    assert figures["engine"]["tokens_per_s"] is not None
