"""A scripted engine on raw sockets: it can be slow, cut, wrong or silent at any byte, die and come back.

A script is a function of one `Call`; `play(...)` makes one from events and from things to do in between:

    engine.script = play(chunk({"content": "some"}), Call.reset)

GETs are answered as our engine does (docs/inference-vllm.md, "Over HTTP"): /health, /readyz, /livez,
/metrics, /v1/models and /v1/triplex/capacity, from attributes that tests may change. `renew` makes all
as it was.
"""

import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

DEADLINE_S = 15.0
MODEL = {"id": "triplex-tiny", "object": "model", "created": 1, "owned_by": "triplex", "max_model_len": 32768}
CAPACITY = {
    "engine": "vllm",
    "model": "triplex-tiny",
    "num_blocks": 100_000,
    "fixed_blocks_per_request": 58,
    "tokens_per_block": 9776,
    "max_model_len": 32768,
    "max_num_seqs": 256,
    "source": "the test",
}


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = DEADLINE_S) -> Any:
    """Poll until `condition` is true; AssertionError naming `what` after the deadline."""
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s:
        if value := condition():
            return value
        time.sleep(0.01)
    raise AssertionError(f"not within {timeout_s} s: {what}")


class Call:
    """One POST that the engine received, and the pen to answer it."""

    def __init__(self, sock: socket.socket, path: str, headers: dict[str, str], body: bytes) -> None:
        self.sock = sock
        self.path = path
        self.headers = headers
        self.body = body
        self.request: dict[str, Any] = json.loads(body)
        self.events = 0  # sent by `event`

    def raw(self, data: bytes) -> None:
        self.sock.sendall(data)

    def answer(self, status: int, body: Any, content_type: str = "application/json", extra: str = "") -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = f"HTTP/1.1 {status} X\r\ncontent-type: {content_type}\r\ncontent-length: {len(data)}\r\n"
        self.raw(f"{head}{extra}\r\n".encode() + data)

    def open_stream(self) -> None:
        self.raw(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")

    def chunk(self, data: bytes) -> None:
        self.raw(b"%x\r\n%s\r\n" % (len(data), data))

    def event(self, data: Any) -> None:
        self.chunk(frame(data))
        self.events += 1

    def end_stream(self) -> None:
        self.raw(b"0\r\n\r\n")

    def trickle(self, data: bytes) -> None:
        """Send each byte as a chunk of its own."""
        for byte in data:
            self.chunk(bytes([byte]))

    def reset(self) -> None:
        """End the connection by RST, as a killed process or a firewall does."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()

    def cut(self) -> None:
        """End the connection by FIN, whatever HTTP has still to say."""
        self.sock.shutdown(socket.SHUT_WR)
        self.sock.close()

    @property
    def closed(self) -> bool:
        """Whether the script ended the connection."""
        return self.sock.fileno() == -1

    def wait_closed(self, timeout_s: float = DEADLINE_S) -> float:
        """Seconds until the gateway closed the connection; AssertionError when it does not."""
        began_s = time.monotonic()
        self.sock.settimeout(timeout_s)
        try:
            assert self.sock.recv(1) == b""
        except ConnectionError:
            pass
        except TimeoutError as exc:
            raise AssertionError("the gateway left the connection open") from exc
        return time.monotonic() - began_s


Script = Callable[[Call], None]


class FakeEngine:
    """Listens on loopback; `script` answers the POSTs, `calls` remembers them.

    `close` is the engine's death, for every connection too; `open` its return, on the same port. In between
    connections are refused.
    """

    def __init__(self, port: int = 0) -> None:
        self.renew()
        self.port = port
        self._playing: set[Call] = set()
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self.open()

    def renew(self) -> None:
        self.script: Script = complete("hello")
        self.calls: list[Call] = []
        self.token_count: int | None = None  # when set, /tokenize gives it and no script sees the call
        self.tokenized: list[Call] = []
        self.probe: Script | None = None  # when set, it answers GETs
        self.probes: list[str] = []  # paths of GETs
        self.health_status = 200
        self.ready_body: dict[str, Any] = {"state": "ready", "reasons": []}
        self.models: list[dict[str, Any]] = [MODEL]
        self.capacity: dict[str, Any] | None = dict(CAPACITY)  # None: an engine without that route
        self.metrics: dict[str, float] = {}  # beside or in place of the counted ones, by full name
        self.faults: list[BaseException] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def running(self) -> int:
        """Scripts that play now."""
        return len(self._playing)

    def open(self) -> None:
        """Listen, on the port of before."""
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self.port = self._listener.getsockname()[1]
        self._accepting = threading.Thread(target=self._accept)
        self._accepting.start()

    def close(self) -> None:
        """End the listener and all connections, and wait for the scripts."""
        if self._listener.fileno() == -1:
            return
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._accepting.join(DEADLINE_S)
        for sock in list(self._sockets):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive(), "a script of the fake engine hangs"
        self._threads.clear()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            thread = threading.Thread(target=self._serve, args=(sock,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, sock: socket.socket) -> None:
        self._sockets.add(sock)
        try:
            with sock:
                while self._serve_one(sock):
                    pass
        except OSError:
            pass
        except BaseException as exc:
            self.faults.append(exc)
        finally:
            self._sockets.discard(sock)

    def _serve_one(self, sock: socket.socket) -> bool:
        # No makefile(): it would keep the socket open after close(), and nothing could be reset.
        received = b""
        while b"\r\n\r\n" not in received:
            data = sock.recv(65536)
            if not data:
                return False
            received += data
        head, _, body = received.partition(b"\r\n\r\n")
        line, *lines = head.decode().split("\r\n")
        method, path, _ = line.split(" ", 2)
        headers = {
            name.lower(): value.strip() for name, _, value in (entry.partition(":") for entry in lines)
        }
        while len(body) < int(headers.get("content-length", 0)):
            body += sock.recv(1 << 20)
        if method == "GET":
            self.probes.append(path)
            get = Call(sock, path, headers, b"{}")
            (self.probe or self._answer_get)(get)
            return not get.closed
        call = Call(sock, path, headers, body)
        if path == "/tokenize" and self.token_count is not None:
            self.tokenized.append(call)
            call.answer(200, {"count": self.token_count, "max_model_len": 32768, "tokens": []})
            return True
        self.calls.append(call)
        self._playing.add(call)
        try:
            self.script(call)
        finally:
            self._playing.discard(call)
        return not call.closed

    def _answer_get(self, call: Call) -> None:
        if call.path == "/metrics":
            call.answer(200, self._metrics_page(), "text/plain; version=0.0.4")
            return
        pages: dict[str, tuple[int, Any]] = {
            "/livez": (self.health_status, self.ready_body),
            "/health": (self.health_status, self.ready_body),
            "/readyz": (self.health_status, self.ready_body),
            "/v1/models": (200, {"object": "list", "data": self.models}),
        }
        if self.capacity is not None:
            pages["/v1/triplex/capacity"] = (200, self.capacity)
        status, body = pages.get(call.path, (404, {"detail": "Not Found"}))
        call.answer(status, body)

    def _metrics_page(self) -> bytes:
        samples = {
            "vllm:num_requests_running": float(self.running),
            "vllm:num_requests_waiting": 0.0,
            "vllm:kv_cache_usage_perc": 0.0,
            "vllm:prompt_tokens_total": float(len(self.calls)),
            "vllm:generation_tokens_total": float(sum(call.events for call in self.calls)),
            **self.metrics,
        }
        lines = [f'{name}{{engine="0",model_name="triplex-tiny"}} {value}' for name, value in samples.items()]
        return ("\n".join(lines) + "\n").encode()


def frame(data: Any) -> bytes:
    """One event: an object as JSON, bytes as they are."""
    payload = data if isinstance(data, bytes) else json.dumps(data, ensure_ascii=False).encode()
    return b"data: " + payload + b"\n\n"


def chunk(delta: dict[str, Any] | None = None, finish: str | None = None, **fields: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta or {}, "finish_reason": finish}
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "triplex-tiny"}
    return {**head, "choices": [choice], **fields}


USAGE = {
    "prompt_tokens": 3,
    "completion_tokens": 2,
    "total_tokens": 5,
    "prompt_tokens_details": {"cached_tokens": 1},
    "completion_tokens_details": {"reasoning_tokens": 0},
}
USAGE_CHUNK = {**chunk(), "choices": [], "usage": USAGE}


def message(content: str | None, finish: str = "stop", **fields: Any) -> dict[str, Any]:
    said = {"role": "assistant", "content": content, "refusal": None, **fields}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "triplex-tiny",
        "choices": [{"index": 0, "message": said, "finish_reason": finish}],
        "usage": USAGE,
    }


def stream_of(*texts: str, finish: str = "stop", usage: bool = True) -> Iterator[Any]:
    yield chunk({"role": "assistant", "content": ""})
    for text in texts:
        yield chunk({"content": text})
    yield chunk({}, finish)
    if usage:
        yield USAGE_CHUNK
    yield b"[DONE]"


def complete(*texts: str, finish: str = "stop") -> Script:
    """A well-behaved engine that says `texts`, streamed or in one piece."""

    def script(call: Call) -> None:
        if call.request.get("stream"):
            call.open_stream()
            for event in stream_of(*texts, finish=finish):
                call.event(event)
            call.end_stream()
        else:
            call.answer(200, message("".join(texts), finish))

    return script


def play(*steps: Any) -> Script:
    """A stream of events; a step that can be called does something with the call instead.

    It ends as HTTP wants it, unless a step ended the connection. `[DONE]` is a step like others: `DONE`.
    """

    def script(call: Call) -> None:
        call.open_stream()
        for step in steps:
            if callable(step):
                step(call)
            else:
                call.event(step)
        if not call.closed:
            call.end_stream()

    return script


DONE = b"[DONE]"


def hang(call: Call) -> None:
    """Accept and never answer: return when the gateway gives up."""
    call.wait_closed()


def waiting_for(event: threading.Event) -> Script:
    """A step: say nothing more until the test sets `event`."""

    def step(_call: Call) -> None:
        assert event.wait(DEADLINE_S), "the test never let the script go on"

    return step


def once(condition: Callable[[], Any], what: str, script: Script) -> Script:
    """A script that begins, status line included, when `condition` holds."""

    def delayed(call: Call) -> None:
        wait_for(condition, what)
        script(call)

    return delayed


def after(event: threading.Event, script: Script) -> Script:
    """A script that begins, status line included, when the test sets `event`."""

    def delayed(call: Call) -> None:
        waiting_for(event)(call)
        script(call)

    return delayed


def answer(status: int, body: Any, content_type: str = "application/json", extra: str = "") -> Script:
    return lambda call: call.answer(status, body, content_type, extra)
