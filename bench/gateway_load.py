"""A client that costs little: connections that stay open and count tokens, for bench/gateway_bench.py."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from gateway_engine import TOKEN
from gateway_servers import Server

_TIMEOUT_S = 120
_END = b"0\r\n\r\n"


class LoadError(Exception):
    """A server did not answer, or not with a 200."""


@dataclass
class Answer:
    """What came back, on the clock of `time.perf_counter`."""

    asked_s: float
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    ended_s: float = 0.0
    tokens: int = 0

    def took_s(self) -> float:
        """Seconds for the whole answer."""
        return self.ended_s - self.asked_s

    def first_token_after_s(self) -> float:
        """Seconds to the first token."""
        return self.first_token_s - self.asked_s


class Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._done: asyncio.Future[Answer] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment] # uvloop's is of another class

    async def ask(self, path: str, body: bytes = b"") -> Answer:
        """GET, or POST when there is a body; raises LoadError unless the answer is a 200."""
        self._head, self._left = b"", -1
        self._tail = b""
        self._done = asyncio.get_running_loop().create_future()
        line = f"{'POST' if body else 'GET'} {path} HTTP/1.1\r\nhost: {self._host}\r\n"
        fields = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        self._answer = Answer(time.perf_counter())
        self._transport.writelines([(line + fields).encode(), body])
        async with asyncio.timeout(_TIMEOUT_S):
            return await self._done

    def data_received(self, data: bytes) -> None:
        if self._left == -1:
            self._head += data
            head, end, data = self._head.partition(b"\r\n\r\n")
            if not end:
                return
            if not head.startswith(b"HTTP/1.1 200"):
                self._fail(f"answered {(head + data)[:500]!r}")
                return
            length = head.lower().partition(b"content-length:")[2]
            self._left = int(length.split(b"\r", 1)[0]) if length else 0
            self._chunked = not length
        if self._chunked:
            ended = self._note_tokens(data)
        else:
            self._left -= len(data)
            ended = self._left == 0
        if ended and self._done is not None and not self._done.done():
            self._answer.ended_s = time.perf_counter()
            self._done.set_result(self._answer)

    def _note_tokens(self, data: bytes) -> bool:
        """Count tokens; whether this is the end of the answer. Either may be cut anywhere."""
        data = self._tail + data
        self._tail = data[1 - len(TOKEN) :]
        if count := data.count(TOKEN):
            self._answer.tokens += count
            self._answer.last_token_s = time.perf_counter()
            self._answer.first_token_s = self._answer.first_token_s or self._answer.last_token_s
        return data.endswith(_END)

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(f"closed the connection ({exc})")

    def _fail(self, what: str) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(LoadError(f"{self._host} {what}"))

    def close(self) -> None:
        """Close at once."""
        self._transport.abort()


@asynccontextmanager
async def connected(server: Server, count: int = 1) -> AsyncIterator[list[Connection]]:
    """Open `count` connections for the block."""
    loop = asyncio.get_running_loop()
    connections: list[Connection] = []
    try:
        host = f"{server.host}:{server.port}"
        for _ in range(count):
            _, connection = await loop.create_connection(partial(Connection, host), server.host, server.port)
            connections.append(connection)
        yield connections
    finally:
        for connection in connections:
            connection.close()


def chat(model: str, tokens: int, *, stream: bool) -> bytes:
    """Return the body of a small request."""
    messages = [{"role": "user", "content": "Count from one to a thousand."}]
    request = {"model": model, "messages": messages, "temperature": 0, "max_tokens": tokens, "stream": stream}
    return json.dumps(request).encode()
