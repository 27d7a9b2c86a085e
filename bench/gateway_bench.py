"""What the gateway costs: time added to requests, tokens a second, pauses, memory; beside LiteLLM's proxy.

All sides are asked in turn, so that whatever else the machine does hits each of them; a figure is the median
over the rounds. "direct" is the engine itself, which costs next to nothing: what it does is also the most
that this client and this engine can do here. The gateway and LiteLLM are one process each.
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from pathlib import Path

import gateway_servers as servers
import uvloop
from gateway_engine import AT_ONCE, PACED, TOKENS_PER_S
from gateway_load import Answer, Connection, LoadError, chat, connected
from gateway_pauses import longest_wait_s, pictures, post
from gateway_servers import Server

_CHAT = "/v1/chat/completions"
_REQUESTS = 30  # of a round, one by one
_CONNECTIONS = 16
_WINDOW_S = 2.0
_PACED_STREAMS = 100
_PACED_TOKENS = 300
_EXAMPLES = """\
examples:
  .venv/bin/python bench/gateway_bench.py
  .venv/bin/python bench/gateway_bench.py --litellm var/litellm/bin/litellm request throughput
"""

Sides = dict[str, Server]
Figures = dict[str, list[float]]


def main() -> int:
    """Run the benchmark; returns the exit status."""
    options = _options()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        direct = stack.enter_context(servers.engine(folder))
        sides = {"direct": direct, "gateway": stack.enter_context(servers.gateway(folder, direct.url))}
        if options.litellm:
            sides["litellm"] = stack.enter_context(servers.litellm(folder, options.litellm, direct.url))
        print(
            f"medians of {options.rounds} rounds; load {os.getloadavg()[0]:.1f}, {os.cpu_count()} processors"
        )
        try:
            for name in options.measure or _MEASUREMENTS:
                uvloop.run(_MEASUREMENTS[name](sides, options.rounds))
        except LoadError as exc:
            raise SystemExit(f"gateway_bench: {exc}") from None
        print(f"load {os.getloadavg()[0]:.1f}")
    return 0


def _options() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, epilog=_EXAMPLES, formatter_class=raw)
    parser.add_argument("measure", nargs="*", help=f"of {', '.join(_MEASUREMENTS)}; all when none is named")
    parser.add_argument("--litellm", metavar="PATH", help="the executable of LiteLLM's proxy, a third side")
    parser.add_argument("--rounds", type=int, default=5, help="at least 5 (default 5)")
    options = parser.parse_args()
    if options.rounds < 5:
        parser.error("--rounds must be at least 5")
    if unknown := set(options.measure) - set(_MEASUREMENTS):
        parser.error(f"no such measurement: {', '.join(sorted(unknown))}")
    return options


# One request at a time.


async def _request(sides: Sides, rounds: int) -> None:
    body = chat(AT_ONCE, 1, stream=False)
    _report_added("request, ms", await _one_by_one(sides, rounds, body, Answer.took_s))
    body = chat(AT_ONCE, 1, stream=True)
    _report_added("first token, ms", await _one_by_one(sides, rounds, body, Answer.first_token_after_s))


async def _one_by_one(sides: Sides, rounds: int, body: bytes, seconds: Callable[[Answer], float]) -> Figures:
    """Milliseconds, the median of each round."""
    figures: Figures = {name: [] for name in sides}
    for _ in range(rounds):
        taken: Figures = {name: [] for name in sides}
        async with AsyncExitStack() as stack:
            connections = {
                name: (await stack.enter_async_context(connected(side)))[0] for name, side in sides.items()
            }
            for turn in range(_REQUESTS + 1):
                for name, connection in connections.items():
                    answer = await connection.ask(_CHAT, body)
                    if turn:  # the first one opened a connection to the engine
                        taken[name].append(seconds(answer) * 1e3)
        for name, values in taken.items():
            figures[name].append(statistics.median(values))
    return figures


# Many at once.


async def _throughput(sides: Sides, rounds: int) -> None:
    print(f"{_CONNECTIONS} connections:")
    requests, request_cpu = await _in_turn(sides, rounds, _requests_per_s)
    _report("requests/s", requests, 0)
    _report("  processor time, ms", request_cpu, 2)
    tokens, token_cpu = await _in_turn(sides, rounds, _tokens_per_s)
    _report("streamed tokens/s", tokens, 0)
    _report("  processor time, us", token_cpu, 1)


async def _requests_per_s(side: Server) -> tuple[float, float]:
    """Requests a second, and processor milliseconds of the server for each."""
    body = chat(AT_ONCE, 1, stream=False)
    done = 0

    async def keep_asking(connection: Connection) -> None:
        nonlocal done
        while time.perf_counter() < end_s:
            await connection.ask(_CHAT, body)
            done += 1

    async with connected(side, _CONNECTIONS) as connections:
        await asyncio.gather(*(connection.ask(_CHAT, body) for connection in connections))
        began_s, cpu_s = time.perf_counter(), side.cpu_s()
        end_s = began_s + _WINDOW_S
        await asyncio.gather(*(keep_asking(connection) for connection in connections))
        return done / (time.perf_counter() - began_s), (side.cpu_s() - cpu_s) / done * 1e3


async def _tokens_per_s(side: Server) -> tuple[float, float]:
    """Tokens a second that the engine has at once, and processor microseconds of the server for each."""
    few = await _stream(side, AT_ONCE, _CONNECTIONS, 100)
    wanted = round(few[0] * _WINDOW_S / _CONNECTIONS)
    return await _stream(side, AT_ONCE, _CONNECTIONS, max(100, wanted))


async def _stream(side: Server, model: str, count: int, tokens: int) -> tuple[float, float]:
    """Tokens a second from the first request to the last token, and the server's processor us for each."""
    body = chat(model, tokens, stream=True)
    async with connected(side, count) as connections:
        cpu_s = side.cpu_s()
        answers = await asyncio.gather(*(connection.ask(_CHAT, body) for connection in connections))
        cpu_s = side.cpu_s() - cpu_s
    total = sum(answer.tokens for answer in answers)
    if total != count * tokens:
        raise LoadError(f"{side.url} sent {total} tokens of {count * tokens}")
    took_s = max(answer.last_token_s for answer in answers) - min(answer.asked_s for answer in answers)
    return total / took_s, cpu_s / total * 1e6


async def _in_turn(
    sides: Sides, rounds: int, measure: Callable[[Server], Awaitable[tuple[float, float]]]
) -> tuple[Figures, Figures]:
    figures: Figures = {name: [] for name in sides}
    costs: Figures = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            figure, cost = await measure(side)
            figures[name].append(figure)
            costs[name].append(cost)
    return figures, costs


# Of our gateway only.


async def _paced(sides: Sides, rounds: int) -> None:
    print(f"{_PACED_STREAMS} streams of {TOKENS_PER_S} tokens/s:")
    measure = partial(_stream, model=PACED, count=_PACED_STREAMS, tokens=_PACED_TOKENS)
    ours = {name: sides[name] for name in ("direct", "gateway")}
    rates, cpu_us = await _in_turn(ours, rounds, measure)
    _report("streamed tokens/s", rates, 0)
    _report("  of direct, %", _against_direct(rates, lambda rate, direct: rate / direct * 100), 1)
    _report("  processor time, us", cpu_us, 1)


async def _pauses(sides: Sides, rounds: int) -> None:
    quiet_ms, busy_ms = [], []
    for body in pictures(rounds):
        quiet_ms.append(await longest_wait_s(sides["gateway"], asyncio.sleep(_WINDOW_S)) * 1e3)
        work = asyncio.to_thread(post, sides["gateway"], body)
        busy_ms.append(await longest_wait_s(sides["gateway"], work) * 1e3)
    print(f"longest wait for /livez, ms: quiet {_spread(quiet_ms)}, decoding 48 MP {_spread(busy_ms)}")


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} (at most {max(values):.1f})"


async def _memory(sides: Sides, _rounds: int) -> None:
    after = []
    async with connected(sides["gateway"], _CONNECTIONS) as connections:
        for requests in (2_000, 8_000):
            await asyncio.gather(*(_ask_both(one, requests // _CONNECTIONS) for one in connections))
            after.append(sides["gateway"].rss_mib())
    print(f"memory after 2,000 requests {after[0]:.1f} MiB, after 10,000 {after[1]:.1f} MiB")


async def _ask_both(connection: Connection, requests: int) -> None:
    for index in range(requests):
        await connection.ask(_CHAT, chat(AT_ONCE, 20, stream=index % 4 == 0))


# What is printed.


def _report(what: str, figures: Figures, digits: int) -> None:
    medians = {name: statistics.median(values) for name, values in figures.items()}
    columns = (f"{name} {value:9.{digits}f}" for name, value in medians.items())
    print(f"{what:24}", *columns, sep="  ", flush=True)


def _report_added(what: str, figures: Figures) -> None:
    _report(what, figures, 2)
    _report("  added", _against_direct(figures, lambda value, direct: value - direct), 2)


def _against_direct(figures: Figures, compare: Callable[[float, float], float]) -> Figures:
    return {name: list(map(compare, values, figures["direct"])) for name, values in figures.items()}


_MEASUREMENTS = {
    "request": _request,
    "throughput": _throughput,
    "paced": _paced,
    "pauses": _pauses,
    "memory": _memory,
}

if __name__ == "__main__":
    sys.exit(main())
