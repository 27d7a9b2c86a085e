"""An engine that costs next to nothing: `python bench/gateway_engine.py PORT`, for bench/gateway_bench.py.

The model that is asked for chooses the pace: "at-once" has every token ready, "paced" has TOKENS_PER_S. Each
token is an event and a write of its own, as of a real engine.
"""

import asyncio
import json
import re
import sys

import uvloop

TOKENS_PER_S = 30
TOKEN = b"word "
AT_ONCE, PACED = "at-once", "paced"
_MODELS = {"object": "list", "data": [{"id": name, "object": "model"} for name in (AT_ONCE, PACED)]}
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


class _Connection(asyncio.Protocol):
    """One client, one request at a time."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._received = b""
        self._full = False
        self._stream: _Stream | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment] # uvloop's is of another class

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        length = _LENGTH.search(head)
        if end and len(body) >= (int(length[1]) if length else 0):
            self._received = b""
            self._answer(head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        if head.startswith(b"GET"):
            known = head.startswith((b"GET /v1/models ", b"GET /health "))
            self._transport.write(_whole(200 if known else 404, _MODELS))
            return
        request = json.loads(body)
        if not request.get("stream"):
            self._transport.write(_whole(200, _ANSWER))
            return
        self._transport.write(_STREAM_HEAD)
        self._stream = _Stream(request, self._loop.time())
        self._loop.call_soon(self._write_next)

    def _write_next(self) -> None:
        stream = self._stream
        if stream is None or self._full:
            return
        self._transport.write(stream.next())
        if stream.left == 0:
            self._transport.write(stream.end())
            self._stream = None
        elif stream.paced:
            self._loop.call_at(stream.due_s(), self._write_next)
        else:
            self._loop.call_soon(self._write_next)

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        self._write_next()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 the name is asyncio's
        self._stream = None


class _Stream:
    """What is left of one streamed answer."""

    def __init__(self, request: dict[str, object], began_s: float) -> None:
        self.left = self._tokens = int(str(request["max_tokens"]))
        self.paced = request["model"] == PACED
        self._began_s = began_s
        options = request.get("stream_options")
        self._usage = isinstance(options, dict) and options.get("include_usage")

    def next(self) -> bytes:
        """Return the next token's event."""
        self.left -= 1
        return _FIRST if self.left + 1 == self._tokens else _LATER[self.left % len(_LATER)]

    def due_s(self) -> float:
        """When the next token is ready."""
        return self._began_s + (self._tokens - self.left) / TOKENS_PER_S

    def end(self) -> bytes:
        """Return what follows the last token."""
        return _LAST + (_USAGE if self._usage else b"") + _event(b"[DONE]") + b"0\r\n\r\n"


def _whole(status: int, content: object) -> bytes:
    data = json.dumps(content).encode()
    head = b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\n" % status
    return head + b"content-length: %d\r\n\r\n" % len(data) + data


def _event(data: bytes) -> bytes:
    event = b"data: " + data + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(event), event)


def _chunk(choices: list[object], **fields: object) -> bytes:
    head = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": AT_ONCE}
    return _event(json.dumps({**head, "choices": choices, **fields}).encode())


def _delta(delta: dict[str, str], finish: str | None = None) -> list[object]:
    return [{"index": 0, "delta": delta, "finish_reason": finish}]


_COUNTS = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
_SAID = {"index": 0, "message": {"role": "assistant", "content": "one"}, "finish_reason": "length"}
_ANSWER = {
    "id": "1",
    "object": "chat.completion",
    "created": 1,
    "model": AT_ONCE,
    "choices": [_SAID],
    "usage": _COUNTS,
}
_STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_FIRST = _chunk(_delta({"role": "assistant", "content": TOKEN.decode()}))
# LiteLLM ends a stream that says the same a hundred times.
_LATER = [_chunk(_delta({"content": f"{TOKEN.decode()}{number} "})) for number in range(10)]
_LAST = _chunk(_delta({}, "length"))
_USAGE = _chunk([], usage=_COUNTS)


async def _serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(_Connection, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(_serve(int(sys.argv[1])))
