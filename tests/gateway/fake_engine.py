"""A scripted engine on a raw socket: it can be slow, cut, wrong or silent at any byte."""

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
        payload = data if isinstance(data, bytes) else json.dumps(data, ensure_ascii=False).encode()
        self.chunk(b"data: " + payload + b"\n\n")

    def end_stream(self) -> None:
        self.raw(b"0\r\n\r\n")

    def reset(self) -> None:
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()

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
    """Listens on loopback; `script` answers the POSTs, `calls` remembers them."""

    def __init__(self, port: int = 0) -> None:
        self.renew()
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port: int = self._listener.getsockname()[1]
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._accepting = threading.Thread(target=self._accept)
        self._accepting.start()

    def renew(self) -> None:
        self.script: Script = complete("hello")
        self.calls: list[Call] = []
        self.health_status = 200
        self.ready_body: dict[str, Any] = {"state": "ready", "reasons": []}
        self.models: list[dict[str, Any]] = [MODEL]
        self.faults: list[BaseException] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
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

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
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
            self._serve_get(sock, path)
            return True
        call = Call(sock, path, headers, body)
        self.calls.append(call)
        self.script(call)
        return sock.fileno() != -1

    def _serve_get(self, sock: socket.socket, path: str) -> None:
        pages = {
            "/health": (self.health_status, {}),
            "/readyz": (self.health_status, self.ready_body),
            "/v1/models": (200, {"object": "list", "data": self.models}),
        }
        status, body = pages[path]
        Call(sock, path, {}, b"{}").answer(status, body)


def chunk(delta: dict[str, Any] | None = None, finish: str | None = None, **fields: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta or {}, "finish_reason": finish}
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "triplex-tiny"}
    return {**head, "choices": [choice], **fields}


USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
USAGE_CHUNK = {**chunk(), "choices": [], "usage": USAGE}


def message(content: str | None, finish: str = "stop", **fields: Any) -> dict[str, Any]:
    said = {"role": "assistant", "content": content, **fields}
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


def answer(status: int, body: Any, content_type: str = "application/json", extra: str = "") -> Script:
    return lambda call: call.answer(status, body, content_type, extra)
