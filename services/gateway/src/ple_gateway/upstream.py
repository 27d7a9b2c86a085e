"""An HTTP/1.1 client for a server that is near: raw bytes as they come, pooled connections, nothing retried.

General clients take several times its processor time for a request (docs/gateway.md, Measured).
"""

import asyncio
import socket
import ssl
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

import httptools

_MAX_IDLE = 64
_MAX_BUFFERED_BYTES = 256 * 1024
_MAX_HEAD_BYTES = 256 * 1024


class UpstreamError(Exception):
    """The server did not answer, or not to the end; the text is for logs and health."""


class ConnectError(UpstreamError):
    """There is no connection: nothing was sent."""


class AnswerTimeoutError(UpstreamError):
    """The answer did not come in time."""


@dataclass(frozen=True)
class Reply:
    """A whole answer."""

    status: int
    body: bytes


class Connection(asyncio.Protocol):
    """One connection, one exchange at a time."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._lost: str | None = None
        self.idle_since_s = 0.0
        self._renew()

    def _renew(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._pieces: deque[bytes] = deque()
        self._buffered_bytes = 0
        self._head_bytes = 0
        self._waiter: asyncio.Future[None] | None = None
        self._until_close = True
        self.headers: dict[str, str] = {}
        self.status = 0  # 0 until the head is complete
        self.complete = False
        self.reusable = False

    # What the client asks.

    @property
    def closed(self) -> bool:
        """Whether nothing more can be sent."""
        return self._lost is not None or self._transport is None or self._transport.is_closing()

    def send(self, head: bytes, body: bytes) -> None:
        """Send a request; what the last answer left behind is forgotten."""
        self._renew()
        if self._transport is not None:
            self._transport.writelines([head, body])

    async def read_head(self) -> int:
        """Wait for the status; raises UpstreamError."""
        while not self.status:
            self._check()
            await self._wait()
        return self.status

    async def read(self) -> bytes:
        """Return what has come of the body, empty at its end; raises UpstreamError when it is cut."""
        while not self._pieces:
            if self.complete:
                return b""
            self._check()
            await self._wait()
        data = b"".join(self._pieces) if len(self._pieces) > 1 else self._pieces[0]
        self._pieces.clear()
        if self._buffered_bytes > _MAX_BUFFERED_BYTES and self._transport is not None:
            self._transport.resume_reading()
        self._buffered_bytes = 0
        return data

    def __aiter__(self) -> "Connection":
        """Iterate over the body's pieces."""
        return self

    async def __anext__(self) -> bytes:
        piece = await self.read()
        if not piece:
            raise StopAsyncIteration
        return piece

    def abort(self) -> None:
        """End the connection at once, whatever is still to be sent or read."""
        if self._transport is not None:
            self._transport.abort()

    def _check(self) -> None:
        if self._lost is not None:
            raise UpstreamError(self._lost)

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # What the transport calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is of another class

    def data_received(self, data: bytes) -> None:
        if self.complete:
            self._fail("the server spoke unasked")
            return
        if not self.status:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._fail("the answer is no HTTP")
        except httptools.HttpParserUpgrade:
            self._fail("the answer changes the protocol")
        if not self.status and self._head_bytes > _MAX_HEAD_BYTES:
            self._fail("the answer's head is too large")

    def eof_received(self) -> bool:
        return False  # close our side too

    def connection_lost(self, exc: Exception | None) -> None:
        if self._lost is None:
            self._lost = f"{type(exc).__name__}" if exc else "closed by the server"
        if exc is None and self.status and self._until_close:
            self.complete = True
        self._wake()

    def _fail(self, reason: str) -> None:
        self._lost = reason
        self.abort()
        self._wake()

    # What the parser calls; after the end of the answer, only for another one that nobody asked for.

    def on_message_begin(self) -> None:
        if self.complete:
            self.reusable = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.complete:
            return
        key = name.decode("latin-1").lower()
        self.headers[key] = value.decode("latin-1")
        if key in {"content-length", "transfer-encoding"}:
            self._until_close = False

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200 and not self.complete:
            self.status = status
            self._wake()

    def on_body(self, body: bytes) -> None:
        if self.complete:
            return
        self._pieces.append(body)
        self._buffered_bytes += len(body)
        if self._buffered_bytes > _MAX_BUFFERED_BYTES and self._transport is not None:
            self._transport.pause_reading()
        self._wake()

    def on_message_complete(self) -> None:
        if not self.status:  # 1xx: the answer is still to come
            self.headers.clear()
            self._until_close = True
        elif not self.complete:
            self.complete = True
            self.reusable = bool(self._parser.should_keep_alive())
            self._wake()


class Upstream:
    """All connections to one server."""

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        *,
        connect_timeout_s: float,
        idle_s: float,
    ) -> None:
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._prefix = parts.path.rstrip("/")
        own = {"host": parts.netloc, "accept": "*/*", "accept-encoding": "identity", **headers}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in own.items())
        self._connect_timeout_s = connect_timeout_s
        self._idle_s = idle_s
        self._idle: deque[Connection] = deque()
        self._busy: set[Connection] = set()
        self._lookup: asyncio.Task[list[Any]] | None = None

    @asynccontextmanager
    async def exchange(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[Connection]:
        """Send a request and give the connection once the status is there; raises UpstreamError.

        The connection goes back to the pool when the answer was read to its end, else it is closed.
        """
        connection = self._take_idle() or await self._connect()
        self._busy.add(connection)
        try:
            connection.send(self._request_head(method, path, len(body), headers or {}), body)
            await connection.read_head()
            yield connection
        finally:
            self._busy.discard(connection)
            if connection.complete and connection.reusable and len(self._idle) < _MAX_IDLE:
                connection.idle_since_s = _now_s()
                self._idle.append(connection)
            else:
                connection.abort()

    async def get(self, path: str, timeout_s: float, max_bytes: int) -> Reply:
        """GET something small; raises UpstreamError."""
        try:
            async with asyncio.timeout(timeout_s), self.exchange("GET", path) as connection:
                received = bytearray()
                async for piece in connection:
                    received += piece
                    if len(received) > max_bytes:
                        raise UpstreamError(f"the answer to {path} is too large")
                return Reply(connection.status, bytes(received))
        except TimeoutError as exc:
            raise AnswerTimeoutError("no answer in time") from exc

    async def aclose(self) -> None:
        """Close all connections."""
        if self._lookup is not None:
            self._lookup.cancel()
        for connection in [*self._idle, *self._busy]:
            connection.abort()
        self._idle.clear()

    def _request_head(self, method: str, path: str, size_bytes: int, headers: Mapping[str, str]) -> bytes:
        lines = [f"{method} {self._prefix}{path} HTTP/1.1\r\n", self._head]
        lines += [f"{name}: {value}\r\n" for name, value in headers.items()]
        if method == "POST":
            lines.append(f"content-length: {size_bytes}\r\n")
        return "".join([*lines, "\r\n"]).encode("latin-1")

    def _take_idle(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed and _now_s() - connection.idle_since_s < self._idle_s:
                return connection
            connection.abort()
        return None

    async def _connect(self) -> Connection:
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                return await self._connect_to_any()
        except TimeoutError as exc:
            raise ConnectError("connecting took too long") from exc
        except OSError as exc:
            raise ConnectError(type(exc).__name__) from exc

    async def _connect_to_any(self) -> Connection:
        """Try the addresses of the server in turn, each for its share of time; raises the last OSError."""
        loop = asyncio.get_running_loop()
        server_name = self._host if self._tls else None
        failed: OSError | None = None
        addresses = await self._addresses()
        for address in addresses:
            try:
                async with asyncio.timeout(self._connect_timeout_s / len(addresses)):
                    _, connection = await loop.create_connection(
                        Connection, address, self._port, ssl=self._tls, server_hostname=server_name
                    )
            except OSError as exc:  # TimeoutError is one
                failed = exc
            else:
                return connection
        raise failed or OSError(f"{self._host} has no address")

    async def _addresses(self) -> list[str]:
        """Look the name up, once for all who ask meanwhile; raises OSError.

        A lookup outlives our time limits: that of a container which is away takes 10 s, and holds one of the
        two threads that uvloop has for lookups. Within create_connection each would be another one, and would
        log that nobody took its error.
        """
        if self._lookup is None:
            loop = asyncio.get_running_loop()
            asked = loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
            self._lookup = loop.create_task(asked)
            self._lookup.add_done_callback(self._end_lookup)
        return [str(address[0]) for *_, address in await asyncio.shield(self._lookup)]

    def _end_lookup(self, lookup: asyncio.Task[Any]) -> None:
        self._lookup = None
        if not lookup.cancelled():
            lookup.exception()  # taken, also where nobody waits for it any more


def _now_s() -> float:
    return asyncio.get_running_loop().time()
