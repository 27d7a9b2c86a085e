"""One client's connection: uvicorn's, with limits on the time and bytes of what is not a request's body."""

import asyncio
import re
import socket
from typing import Any, ClassVar, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_MAX_HEAD_BYTES: Final = 64 * 1024
# Longer, and a client that reads nothing is gone: what it was sent would be held for ever.
_UNREAD_MS: Final = 60_000
_UPGRADE: Final = re.compile(rb"\r\nupgrade:", re.IGNORECASE)
_LATE: Final = (408, b"Request Timeout", b'{"error":{"message":"The request head did not arrive in time.",')
_LONG: Final = (
    431,
    b"Request Header Fields Too Large",
    b'{"error":{"message":"The request head is too large.",',
)
_HEAD: Final = (
    b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
)
_REST: Final = b'"type":"invalid_request_error","param":null,"code":null}}'


class Connection(HttpToolsProtocol):
    """A head that trickles in, or never ends, must not hold a connection; uvicorn has no limit of its own."""

    head_timeout_s: ClassVar[float] = 10.0
    max_connections: ClassVar[int] = 1024

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_timer: asyncio.TimerHandle | None = None
        self._framing_bytes = 0  # since the last head or piece of a body
        self._in_body = False
        self._seen_request = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count the time from here: a connection that sends nothing is closed too."""
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            transport.abort()
            return
        sock: socket.socket = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNREAD_MS)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        """Feed the parser, and count what is no body: heads, trailers, what stands between chunks."""
        self._framing_bytes += len(data)
        super().data_received(data if self._in_body else _without_upgrade(data))
        if self._framing_bytes > _MAX_HEAD_BYTES:
            self._refuse(_LONG)

    def on_message_begin(self) -> None:
        """The first byte of the next request on this connection."""
        super().on_message_begin()
        if self._seen_request:  # for the first one the time runs already
            self._expect_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; trailers, which uvicorn would add to the headers, are dropped."""
        if not self._in_body:
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        self._framing_bytes = 0
        super().on_body(body)

    def on_headers_complete(self) -> None:
        """The head is there."""
        self._in_body, self._framing_bytes = True, 0
        self._seen_request = True
        self._forget_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The body is there, and its trailers."""
        self._in_body = False
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP; without a word in the middle of another answer."""
        begun = self._seen_request and (self.cycle.response_started or self.pipeline)
        if begun and not self.cycle.response_complete:
            self.transport.close()
        else:
            super().send_400_response(msg)

    def connection_lost(self, exc: Exception | None) -> None:
        """Leave no timer behind."""
        self._forget_timer()
        super().connection_lost(exc)

    def _expect_head(self) -> None:
        self._framing_bytes = 0
        self._forget_timer()
        self._head_timer = self.loop.call_later(self.head_timeout_s, self._refuse, _LATE)

    def _forget_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, refusal: tuple[int, bytes, bytes]) -> None:
        """Answer and close; without a word in the middle of another answer, whose client pipelines."""
        self._forget_timer()
        if self.transport.is_closing():
            return
        if not self._seen_request or self.cycle.response_complete:
            status, phrase, begin = refusal
            body = begin + _REST
            self.transport.write(_HEAD % (status, phrase, len(body)) + body)
        self.transport.close()


def _without_upgrade(data: bytes) -> bytes:
    """Hide an offer to change the protocol, which servers may ignore: the parser would drop the body.

    Java's HTTP client offers HTTP/2 with every request.
    """
    head, end, body = data.partition(b"\r\n\r\n")
    return _UPGRADE.sub(b"\r\nx-upgrade:", head) + end + body if _UPGRADE.search(head) else data


def connection_class(head_timeout_s: float, max_connections: int) -> type[Connection]:
    """Return the protocol for uvicorn, with its limits."""
    limits = {"head_timeout_s": head_timeout_s, "max_connections": max_connections}
    return type("LimitedConnection", (Connection,), limits)
