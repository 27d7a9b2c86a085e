"""What the gateway adds to a request and to a streamed token, against talking to the engine directly.

Both sides are asked in turn, so that whatever else the machine does hits both; each figure is the median over
the rounds of the median within a round.
"""

import argparse
import asyncio
import http.client
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

_START_TIMEOUT_S = 60
_REQUEST_TIMEOUT_S = 120
_EXAMPLES = """\
examples:
  .venv/bin/python bench/gateway_bench.py
  .venv/bin/python bench/gateway_bench.py --engine-url http://127.0.0.1:8100 --tokens 32 --requests 5
"""


def main() -> int:
    """Run the benchmark; returns the exit status."""
    options = _options()
    if options.engine_only:
        asyncio.run(_serve_engine())
        return 0
    with ExitStack() as stack:
        command = [sys.executable, __file__, "--engine-only"]
        engine = options.engine_url or stack.enter_context(_process(command, r"engine url=(\S+)"))
        gateway = stack.enter_context(_gateway(engine))
        sides = {"direct": _Side(engine, options.tokens), "gateway": _Side(gateway, options.tokens)}
        for side in sides.values():
            stack.callback(side.close)
        print(f"{options.rounds} rounds of {options.requests} requests, {options.streams} streams, {engine}")
        _report("request, ms", _interleaved(sides, _Side.request_s, options.rounds, options.requests), 1e3)
        _report(
            "first token, ms", _interleaved(sides, _Side.first_token_s, options.rounds, options.streams), 1e3
        )
        _report(
            "streamed token, us", _interleaved(sides, _Side.token_s, options.rounds, options.streams), 1e6
        )
    return 0


def _options() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, epilog=_EXAMPLES, formatter_class=raw)
    parser.add_argument(
        "--engine-url", help="a running engine; without it a trivial one is started on loopback"
    )
    parser.add_argument("--rounds", type=int, default=7, help="at least 5 (default 7)")
    parser.add_argument("--requests", type=int, default=30, help="requests a round and side (default 30)")
    parser.add_argument("--streams", type=int, default=5, help="streams a round and side (default 5)")
    parser.add_argument("--tokens", type=int, default=200, help="tokens of a stream (default 200)")
    parser.add_argument("--engine-only", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rounds < 5:
        parser.error("--rounds must be at least 5")
    return options


@dataclass
class _Side:
    """One way to the engine, over one connection that stays open."""

    url: str
    tokens: int

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        self._connection = http.client.HTTPConnection(
            parts.hostname or "", parts.port, timeout=_REQUEST_TIMEOUT_S
        )
        self._ask("GET", "/v1/models")
        self._model = json.loads(self._connection.getresponse().read())["data"][0]["id"]

    def close(self) -> None:
        self._connection.close()

    def _ask(self, method: str, path: str, **fields: object) -> None:
        body = json.dumps(fields) if fields else None
        self._connection.request(method, path, body, {"content-type": "application/json"})

    def _chat(self, tokens: int, *, stream: bool) -> http.client.HTTPResponse:
        messages = [{"role": "user", "content": "Count from one to a thousand."}]
        self._ask(
            "POST",
            "/v1/chat/completions",
            model=self._model,
            messages=messages,
            temperature=0,
            max_tokens=tokens,
            stream=stream,
        )
        response = self._connection.getresponse()
        if response.status != 200:
            raise SystemExit(
                f"gateway_bench: {self.url} answers {response.status}: {response.read()[:300]!r}"
            )
        return response

    def request_s(self) -> float:
        """Seconds for one short answer in one piece."""
        began_s = time.perf_counter()
        self._chat(1, stream=False).read()
        return time.perf_counter() - began_s

    def _stream_s(self, tokens: int) -> tuple[float, float]:
        """Seconds to the first event, and from it to the last for each event."""
        began_s = time.perf_counter()
        response = self._chat(tokens, stream=True)
        arrived_s = [time.perf_counter() for line in response if line.startswith(b"data: {")]
        return arrived_s[0] - began_s, (arrived_s[-1] - arrived_s[0]) / max(1, len(arrived_s) - 1)

    def first_token_s(self) -> float:
        """Seconds to the first event of a stream."""
        return self._stream_s(2)[0]  # more would compete with the first for the machine

    def token_s(self) -> float:
        """Seconds for each event after the first."""
        return self._stream_s(self.tokens)[1]


def _interleaved(
    sides: dict[str, _Side], measure: Callable[[_Side], float], rounds: int, repeats: int
) -> dict[str, float]:
    for side in sides.values():
        measure(side)  # connections, caches and first-time code are not what is measured
    medians: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        taken: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(repeats):
            for name, side in sides.items():
                taken[name].append(measure(side))
        for name, values in taken.items():
            medians[name].append(statistics.median(values))
    return {name: statistics.median(values) for name, values in medians.items()}


def _report(what: str, seconds: dict[str, float], unit: float) -> None:
    direct, gateway = seconds["direct"] * unit, seconds["gateway"] * unit
    print(
        f"{what:20} direct {direct:9.3f}  gateway {gateway:9.3f}  added {gateway - direct:9.3f}  "
        f"ratio {gateway / direct:6.2f}"
    )


@contextmanager
def _gateway(engine_url: str) -> Iterator[str]:
    command = [
        sys.executable,
        "-m",
        "ple_gateway",
        "serve",
        "--http-address",
        "127.0.0.1:0",
        "--engine-url",
        engine_url,
    ]
    with _process(command, r"listening url=(\S+)") as url:
        parts = urlsplit(url)
        end_s = time.monotonic() + _START_TIMEOUT_S
        while True:
            connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=5)
            try:
                connection.request("GET", "/readyz")
                if connection.getresponse().status == 200:
                    break
            finally:
                connection.close()
            if time.monotonic() > end_s:
                raise SystemExit(f"gateway_bench: the engine at {engine_url} is not ready")
            time.sleep(0.1)
        yield url


@contextmanager
def _process(command: list[str], ready: str) -> Iterator[str]:
    """Run a process of ours; gives what `ready` captures from its stderr. Ends it afterwards."""
    # Only this file's own variables: settings of a running installation must not reach the measured gateway.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PLE_GATEWAY_")}
    environment["PLE_GATEWAY_DRAIN_TIMEOUT_S"] = "0"
    log = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert log.stderr is not None
    try:
        for line in log.stderr:
            if found := re.search(ready, line):
                break
        else:
            raise SystemExit(f"gateway_bench: {command[1:3]} did not start")
        # Logs are drained by a process that costs the measured ones nothing.
        drain = subprocess.Popen(["/bin/cat"], stdin=log.stderr, stdout=subprocess.DEVNULL)
        try:
            yield found.group(1)
        finally:
            log.send_signal(signal.SIGTERM)
            log.wait(_START_TIMEOUT_S)
            drain.wait(_START_TIMEOUT_S)
    finally:
        log.kill()
        log.wait(_START_TIMEOUT_S)
        log.stderr.close()


_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\n%s\r\n\r\n"


async def _serve_engine() -> None:
    """Answer as an engine that costs nothing: every token is ready at once, each written by itself."""
    server = await asyncio.start_server(_serve_connection, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    print(f"engine url=http://127.0.0.1:{port}", file=sys.stderr, flush=True)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    server.close()


async def _serve_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = re.search(r"content-length: (\d+)", head)
            body = await reader.readexactly(int(length.group(1)) if length else 0)
            request = json.loads(body or b"{}")
            if request.get("stream"):
                await _stream(writer, request["max_tokens"])
            else:
                _answer(writer, head)
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


def _answer(writer: asyncio.StreamWriter, head: str) -> None:
    said = {"index": 0, "message": {"role": "assistant", "content": "one"}, "finish_reason": "length"}
    answer: dict[str, object] = {"id": "1", "object": "chat.completion", "choices": [said]}
    if head.startswith("get"):
        answer = {"object": "list", "data": [{"id": "trivial", "object": "model"}]}
    data = json.dumps(answer).encode()
    writer.write(_HEAD % (b"application/json", b"content-length: %d" % len(data)) + data)


async def _stream(writer: asyncio.StreamWriter, tokens: int) -> None:
    writer.write(_HEAD % (b"text/event-stream", b"transfer-encoding: chunked"))
    for index in range(tokens):
        choice = {
            "index": 0,
            "delta": {"content": "word "},
            "finish_reason": "length" if index == tokens - 1 else None,
        }
        head = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "trivial"}
        data = json.dumps({**head, "choices": [choice]}).encode()
        _write_event(writer, data)
        await writer.drain()
        await asyncio.sleep(0)
    _write_event(writer, b"[DONE]")
    writer.write(b"0\r\n\r\n")


def _write_event(writer: asyncio.StreamWriter, data: bytes) -> None:
    event = b"data: " + data + b"\n\n"
    writer.write(b"%x\r\n%s\r\n" % (len(event), event))


if __name__ == "__main__":
    sys.exit(main())
