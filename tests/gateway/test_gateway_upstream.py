"""The client of the engine, against servers that speak every kind of HTTP, and none."""

import asyncio
import gc
import socket
import ssl
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import pytest
import trustme
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from ple_gateway.upstream import AnswerTimeoutError, ConnectError, Reply, Upstream, UpstreamError

CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n6\r\n world\r\n0\r\n\r\n"
LENGTH = b"HTTP/1.1 200 OK\r\ncontent-length: 11\r\n\r\nhello world"


class Server:
    """Answers each request with the same bytes, in pieces; counts connections.

    `unasked` is said after the first answer, once `idle` is set.
    """

    def __init__(self, pieces: list[bytes], *, close: bool = False, unasked: bytes = b"") -> None:
        self.pieces, self.close, self.unasked = pieces, close, unasked
        self.idle, self.said = asyncio.Event(), asyncio.Event()
        self.connections = 0
        self.heads: list[bytes] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                self.heads.append(await reader.readuntil(b"\r\n\r\n"))
                for piece in self.pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
                if self.close:
                    return
                if self.unasked:
                    await self.idle.wait()
                    writer.write(self.unasked)
                    await writer.drain()
                    self.said.set()
                    self.unasked = b""
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()


def run(
    server: Server,
    work: Callable[[Upstream], Awaitable[Any]],
    tls: tuple[Any, Any] = (None, None),
    **options: Any,
) -> Any:
    async def main() -> Any:
        listening = await asyncio.start_server(server, "127.0.0.1", 0, ssl=tls[0])
        port = listening.sockets[0].getsockname()[1]
        scheme = "https" if tls[0] else "http"
        upstream = Upstream(
            f"{scheme}://127.0.0.1:{port}/base/",
            {"a": "b"},
            **{"connect_timeout_s": 3, "idle_s": 9, **options},
        )
        if tls[1]:
            upstream._tls = tls[1]
        try:
            return await asyncio.wait_for(work(upstream), 10)
        finally:
            await upstream.aclose()
            listening.close()

    return asyncio.run(main())


async def get(upstream: Upstream) -> Reply:
    return await upstream.get("/x", 5, 1000)


@pytest.mark.parametrize("answer", [CHUNKED, LENGTH])
@given(cuts=st.sets(st.integers(1, 60)))
def test_any_cut_gives_the_same_answer(answer, cuts):
    edges = [0, *sorted(cut for cut in cuts if cut < len(answer)), len(answer)]
    pieces = [answer[a:b] for a, b in pairwise(edges)]
    assert run(Server(pieces), get) == Reply(200, b"hello world")


def test_request_is_what_http_wants():
    server = Server([LENGTH])

    async def work(upstream):
        async with upstream.exchange("POST", "/v1/x", b"{}", {"x-request-id": "r"}) as answer:
            return [piece async for piece in answer]

    assert b"".join(run(server, work)) == b"hello world"
    line, *headers = server.heads[0].decode().split("\r\n")
    assert line == "POST /base/v1/x HTTP/1.1"
    assert {"a: b", "x-request-id: r", "content-length: 2", "accept-encoding: identity"} <= set(headers)
    assert any(header.startswith("host: 127.0.0.1:") for header in headers)


@pytest.mark.parametrize("answer", [CHUNKED, LENGTH, b"HTTP/1.1 204 No Content\r\n\r\n"])
def test_connections_are_used_again(answer):
    server = Server([answer])

    async def work(upstream):
        return [await get(upstream) for _ in range(3)]

    assert len(set(run(server, work))) == 1
    assert (server.connections, len(server.heads)) == (1, 3)


@pytest.mark.parametrize(
    ("answer", "options"),
    [
        (LENGTH, {"idle_s": 0}),
        (LENGTH.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"), {}),
        (LENGTH.replace(b"HTTP/1.1", b"HTTP/1.0"), {}),
        (LENGTH + b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\n\r\n", {}),
    ],
    ids=["idle too long", "close", "HTTP/1.0", "an answer to nothing"],
)
def test_connections_are_not_used_again(answer, options):
    server = Server([answer])

    async def work(upstream):
        first = await get(upstream)
        await asyncio.sleep(0.01)
        return first, await get(upstream)

    assert run(server, work, **options) == (Reply(200, b"hello world"),) * 2
    assert server.connections == 2


def test_idle_connection_that_speaks_is_given_up():
    """What it said must not become the answer to the next request."""
    server = Server([LENGTH], unasked=b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\n\r\n")

    async def work(upstream):
        await get(upstream)
        server.idle.set()
        await server.said.wait()
        for _ in range(1000):  # what was said is on its way through loopback
            if upstream._idle[0].closed:
                break
            await asyncio.sleep(0.001)
        return await get(upstream)

    assert run(server, work) == Reply(200, b"hello world")
    assert server.connections == 2


def test_answer_that_is_not_read_closes_the_connection():
    server = Server([CHUNKED[:-5]])

    async def work(upstream):
        async with upstream.exchange("GET", "/") as answer:
            return await anext(answer)

    run(server, work)
    assert server.connections == 1


def test_interim_answers_are_passed_over():
    server = Server([b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n", LENGTH])
    assert run(server, get) == Reply(200, b"hello world")


def test_body_may_end_with_the_connection():
    server = Server([b"HTTP/1.1 200 OK\r\ncontent-type: x\r\n\r\nhello", b" world"], close=True)
    assert run(server, get) == Reply(200, b"hello world")


@pytest.mark.parametrize(
    "pieces",
    [
        [b""],
        [b"HTTP/1.1 200 OK\r\ncontent-"],
        [LENGTH[:-1]],
        [CHUNKED[:-3]],
        [b"SSH-2.0-OpenSSH\r\n\r\n"],
        [b"HTTP/1.1 200 OK\r\nx: " + b"a" * 300_000],
        [b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n"],
        [b"HTTP/1.1 101 Switching\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n"],
        [LENGTH[:-11].replace(b"11", b"2000") + b"x" * 2000],
    ],
    ids=["nothing", "head", "length", "chunks", "no HTTP", "endless head", "bad chunk", "upgrade", "large"],
)
def test_broken_answers_are_errors(pieces):
    with pytest.raises(UpstreamError):
        run(Server(pieces, close=True), get)


def test_answer_that_does_not_come_is_a_timeout():
    async def work(upstream):
        await upstream.get("/", 0.05, 10)

    with pytest.raises(AnswerTimeoutError):
        run(Server([b"HTTP/1.1 200 OK\r\n"]), work)


def test_nobody_there_is_told_apart():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    async def main():
        upstream = Upstream(f"http://127.0.0.1:{port}", {}, connect_timeout_s=1, idle_s=1)
        await upstream.get("/", 1, 10)

    with pytest.raises(ConnectError, match="ConnectionRefusedError"):
        asyncio.run(main())


def test_g56_connecting_has_a_time_limit():
    with socket.create_server(("127.0.0.1", 0), backlog=0) as deaf, ExitStack() as stack:
        for _ in range(4):  # a full backlog answers nothing
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(deaf.getsockname())

        async def main():
            url = f"http://127.0.0.1:{deaf.getsockname()[1]}"
            await Upstream(url, {}, connect_timeout_s=0.1, idle_s=1).get("/", 5, 10)

        with pytest.raises(ConnectError, match="took too long"):
            asyncio.run(main())


def test_a_name_that_is_found_too_late_leaves_no_error_behind():
    """Names of containers resolve late at a cold start; uvloop's own lookup would log that it failed."""
    unretrieved = []

    async def main():
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unretrieved.append(context))
        upstream = Upstream("http://engine.invalid", {}, connect_timeout_s=0, idle_s=1)
        for _ in range(5):
            with pytest.raises(ConnectError, match="took too long"):
                await upstream.get("/", 5, 10)
        # Lookups are answered in turn: after this one, the others have ended too.
        with pytest.raises(socket.gaierror):
            await asyncio.get_running_loop().getaddrinfo("other.invalid", 80)
        gc.collect()

    uvloop.run(main())
    assert unretrieved == []


def test_a_name_that_nobody_knows_is_told_apart():
    async def main():
        await Upstream("http://engine.invalid", {}, connect_timeout_s=60, idle_s=1).get("/", 60, 10)

    with pytest.raises(ConnectError, match="gaierror"):
        uvloop.run(main())


def test_one_lookup_at_a_time(monkeypatch):
    """The name of a container that is away takes 10 s: lookups for each probe leave no thread for others."""
    asked = []

    async def main():
        loop, answered = asyncio.get_running_loop(), asyncio.Event()
        listening = await asyncio.start_server(Server([LENGTH]), "127.0.0.1", 0)

        async def slow(host, port, **_):
            asked.append(host)
            await answered.wait()
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

        monkeypatch.setattr(loop, "getaddrinfo", slow)
        port = listening.sockets[0].getsockname()[1]
        upstream = Upstream(f"http://engine.invalid:{port}", {}, connect_timeout_s=0.01, idle_s=9)
        for _ in range(3):
            with pytest.raises(ConnectError, match="took too long"):
                await get(upstream)
        assert asked == ["engine.invalid"]
        upstream._connect_timeout_s = 3
        waiting = [asyncio.create_task(get(upstream)) for _ in range(3)]
        await asyncio.sleep(0)
        answered.set()
        replies = await asyncio.gather(*waiting)
        assert asked == ["engine.invalid"]
        await upstream.aclose()
        listening.close()
        return replies

    assert asyncio.run(main()) == [Reply(200, b"hello world")] * 3


@contextmanager
def mute(address):
    """A port where nobody takes connections: one that waits fills the queue, and others get no answer."""
    with socket.socket() as listening, socket.socket() as waiting:
        listening.bind(address)
        listening.listen(0)
        waiting.connect(address)
        yield


@pytest.mark.parametrize("first", ["refuses", "is mute"])
def test_every_address_of_a_name_is_tried(monkeypatch, first):
    """`localhost` may be ::1 first, where this server does not listen."""

    async def main():
        loop = asyncio.get_running_loop()
        listening = await asyncio.start_server(Server([LENGTH]), "127.0.0.1", 0)
        port = listening.sockets[0].getsockname()[1]
        with mute(("127.0.0.2", port)) if first == "is mute" else nullcontext():
            return await ask(loop, listening, port)

    async def ask(loop, listening, port):
        addresses = [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port)) for host in ("127.0.0.2", "127.0.0.1")
        ]

        async def two_addresses(host, port, **_):
            return addresses

        # There is no name with two addresses on every machine.
        monkeypatch.setattr(loop, "getaddrinfo", two_addresses)
        upstream = Upstream(f"http://engine.invalid:{port}", {}, connect_timeout_s=3, idle_s=9)
        try:
            return await get(upstream)
        finally:
            await upstream.aclose()
            listening.close()

    assert asyncio.run(main()) == Reply(200, b"hello world")


def test_large_bodies_pass_both_ways_in_little_memory():
    size = 3_000_000
    seen = []

    async def server(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"content-length: 3000000\r\n" in head
        body = await reader.readexactly(size)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size + body)
        await writer.drain()
        writer.close()

    async def work(upstream):
        async with upstream.exchange("POST", "/", b"x" * size) as answer:
            async for piece in answer:
                seen.append(len(piece))
                await asyncio.sleep(0.001)

    run(server, work)
    assert sum(seen) == size
    assert max(seen) < 1_000_000, "reading stops while nobody takes what was read"


def test_tls_is_verified():
    authority = trustme.CA()
    ours, theirs = ssl.create_default_context(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(theirs)
    with pytest.raises(ConnectError):
        run(Server([LENGTH]), get, (theirs, ours))
    authority.configure_trust(ours)
    assert run(Server([LENGTH]), get, (theirs, ours)) == Reply(200, b"hello world")
