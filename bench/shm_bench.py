"""What shared memory costs over a lookup within the process, and what it keeps apart, within one run.

    python bench/shm_bench.py                 all figures
    python bench/shm_bench.py --rounds 9      more rounds

Sides take turns in random order, figures are medians of rounds. Warm rows are drawn anew for every call from
rows that both processes have read (and so mapped) before: no call finds its rows in the processor's cache,
as one that repeats its ids would. Cold rows lie on pages that this run never read, dropped from the cache and
checked with mincore. Carry ratios, never times, to another machine.
"""

import argparse
import ctypes
import mmap
import multiprocessing
import os
import queue
import random
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent import futures
from pathlib import Path

import grpc
import numpy as np
from daemon_bench import CHUNK_ROWS, DEADLINE_S, DECODE_ROWS, ROW_BYTES, WARM_ROWS, make_table, running_daemon

from ple_daemon.contest import HEADING, Figure, ratio
from ple_daemon.source import open_table
from ple_daemon.table import Table
from ple_rpc.client import ClientOptions, TableClient

CALLS = {DECODE_ROWS: 300, CHUNK_ROWS: 10}
STEPS = 60
BULK_ROWS = 3 * CHUNK_ROWS
_MADV_DONTNEED = 4


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7, help="turns of each side (7)")
    parser.add_argument("--table-mib", type=int, default=1536, help="size of the table made for it (1536)")
    options = parser.parse_args()
    path = make_table(options.table_mib)
    forget(path)
    print(HEADING)
    with (
        open_table(path) as table,
        running_daemon(path) as daemon,
        TableClient(daemon.address, ClientOptions(client_name="one")) as shm,
        TableClient(daemon.address, ClientOptions(client_name="two")) as other,
        TableClient(daemon.address, ClientOptions(slots=0)) as stream,
        PingPong() as raw,
        EmptyStream() as empty,
    ):
        for client in (shm, other, stream):
            client.wait_ready(DEADLINE_S)
        table.lookup(np.arange(WARM_ROWS))
        for start in range(0, WARM_ROWS, CHUNK_ROWS):
            shm.lookup(np.arange(start, min(start + CHUNK_ROWS, WARM_ROWS)))
        sides = {"in-process": table.lookup, "shm": shm.lookup, "gRPC stream": stream.lookup}
        warm_figures(sides, {"raw": raw.turn, "empty stream": empty.turn}, options.rounds)
        fresh = UncachedRows(path, table)
        isolation_figures(shm, other, fresh, options.rounds)


def forget(path: Path) -> None:
    """Drop the file from the cache while nobody maps it: large folios of its making would stay as a whole."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def warm_figures(
    sides: dict[str, Callable[[np.ndarray], object]], floors: dict[str, Callable[[], object]], rounds: int
) -> None:
    turns = {name: lambda _, turn=turn: turn() for name, turn in floors.items()}
    step = medians(sides | turns, DECODE_ROWS, rounds)
    over_us = (step["shm"] - step["in-process"]) * 1e6
    print(Figure("16 warm rows, shm minus in-process, us", over_us, "<= 40", ""), flush=True)
    raw_side = "raw ping-pong", step["raw"]
    over = "shm minus in-process", step["shm"] - step["in-process"]
    show("16 warm rows, shm minus in-process / raw ping-pong", over, raw_side, "<= 2")
    stream = "gRPC", step["gRPC stream"]
    empty = "empty stream", step["empty stream"]
    show("16 warm rows, gRPC stream / raw ping-pong", stream, raw_side, "<= 20")
    show("16 warm rows, gRPC stream / grpcio's empty stream", stream, empty, "-")
    show("grpcio's empty stream / raw ping-pong", empty, raw_side, "-")
    chunk = medians(sides, CHUNK_ROWS, rounds)
    inside = "in-process", chunk["in-process"]
    show("8,192 warm rows, shm / in-process", ("shm", chunk["shm"]), inside, "<= 1.5")
    show("8,192 warm rows, gRPC stream / in-process", ("gRPC", chunk["gRPC stream"]), inside, "-")


def show(name: str, slow: tuple[str, float], fast: tuple[str, float], bar: str) -> None:
    print(ratio(name, slow, fast, bar), flush=True)


def medians(sides: dict[str, Callable[[np.ndarray], object]], rows: int, rounds: int) -> dict[str, float]:
    """Median seconds of a call on fresh warm rows, over all rounds."""
    rng = np.random.default_rng()
    taken: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(rounds):
        for side in random.sample(list(sides), len(sides)):
            for _ in range(CALLS[rows]):
                ids = rng.integers(0, WARM_ROWS, rows)
                start_s = time.perf_counter()
                sides[side](ids)
                taken[side].append(time.perf_counter() - start_s)
    return {side: statistics.median(seconds) for side, seconds in taken.items()}


def isolation_figures(decoder: TableClient, other: TableClient, fresh: "UncachedRows", rounds: int) -> None:
    """A decode step's median while another engine looks cold chunks up, against idle."""
    rng = np.random.default_rng()
    taken: dict[tuple[str, bool], list[float]] = {
        (kind, busy): [] for kind in ("warm", "cold") for busy in (False, True)
    }
    for _ in range(rounds):
        for busy in random.sample([False, True], 2):
            fresh.draw(STEPS * DECODE_ROWS + (BULK_ROWS if busy else 0))
            cold, bulk = np.split(rng.permutation(fresh.ids), [STEPS * DECODE_ROWS])
            warm = rng.integers(0, WARM_ROWS, (STEPS, DECODE_ROWS))
            with Bulk(other, bulk):
                for kind, steps in (("cold", cold.reshape(STEPS, DECODE_ROWS)), ("warm", warm)):
                    for ids in steps:
                        start_s = time.perf_counter()
                        decoder.lookup(ids)
                        taken[kind, busy].append(time.perf_counter() - start_s)
    for kind in ("cold", "warm"):
        busy_s, idle_s = (statistics.median(taken[kind, busy]) for busy in (True, False))
        show(
            f"{kind} decode of one engine, another's cold bulk / idle",
            ("bulk", busy_s), ("idle", idle_s), "<= 3",
        )  # fmt: skip


class UncachedRows:
    """Rows on pages that were never drawn, chosen among what mincore says is not cached.

    The daemon maps the file too, and what it has mapped cannot be dropped: such pages are passed over.
    """

    def __init__(self, path: Path, table: Table) -> None:
        self._path, self._table = path, table
        self._pages = np.random.default_rng().permutation(path.stat().st_size // mmap.PAGESIZE - 1)
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.ids = np.zeros(0, np.int64)

    def draw(self, count: int) -> None:
        address, size = ctypes.c_void_p(self._table.first_address), ctypes.c_size_t(self._table.size_bytes)
        self._libc.madvise(address, size, _MADV_DONTNEED)
        forget(self._path)
        cached = np.zeros(self._table.size_bytes // mmap.PAGESIZE, np.uint8)
        self._libc.mincore(address, size, ctypes.c_void_p(cached.ctypes.data))
        chosen = np.flatnonzero(cached[self._pages] & 1 == 0)[:count]
        if chosen.size < count:
            raise SystemExit("out of fresh pages: give a larger --table-mib or fewer --rounds")
        self.ids = -(-self._pages[chosen] * mmap.PAGESIZE // ROW_BYTES)  # the first row that starts there
        self._pages = self._pages[int(chosen[-1]) + 1 :]


class Bulk:
    """Cold lookups by another engine while the body runs: each chunk's rows are drawn once."""

    def __init__(self, client: TableClient, ids: np.ndarray) -> None:
        self._client, self._ids = client, ids
        self._thread = threading.Thread(target=self._run)
        self._begun, self._enough = threading.Event(), threading.Event()

    def _run(self) -> None:
        self._begun.set()
        for start in range(0, len(self._ids), CHUNK_ROWS):
            if not self._enough.is_set():
                self._client.lookup(self._ids[start : start + CHUNK_ROWS])

    def __enter__(self) -> None:
        self._thread.start()
        self._begun.wait()

    def __exit__(self, *_: object) -> None:
        self._enough.set()
        self._thread.join()


class PingPong:
    """Sixteen bytes to another Python process and back, over a Unix socket."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._child = os.fork()
        if self._child == 0:
            self._socket.close()
            while message := theirs.recv(64):
                theirs.send(message)
            os._exit(0)
        theirs.close()

    def turn(self) -> None:
        self._socket.send(b"sixteen bytes...")
        self._socket.recv(64)

    def __enter__(self) -> "PingPong":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        os.waitpid(self._child, 0)


class EmptyStream:
    """A bidirectional stream of grpcio to a process that only hands bytes back: what Python gRPC costs."""

    def __enter__(self) -> "EmptyStream":
        self._folder = tempfile.TemporaryDirectory(prefix="ple-bench-")
        address = f"unix:{self._folder.name}/empty.sock"
        self._process = multiprocessing.get_context("spawn").Process(target=serve_empty, args=(address,))
        self._process.start()
        self._channel = grpc.insecure_channel(address)
        grpc.channel_ready_future(self._channel).result(DEADLINE_S)
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._call = self._channel.stream_stream("/empty/Stream")(iter(self._requests.get, None))
        return self

    def turn(self) -> None:
        self._requests.put(bytes(8 * DECODE_ROWS))
        next(self._call)

    def __exit__(self, *_: object) -> None:
        self._requests.put(None)
        self._channel.close()
        self._process.terminate()
        self._process.join(DEADLINE_S)
        self._folder.cleanup()


def serve_empty(address: str) -> None:
    rows = bytes(DECODE_ROWS * ROW_BYTES)
    handler = grpc.stream_stream_rpc_method_handler(lambda requests, _: (rows for _ in requests))
    server = grpc.server(futures.ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("empty", {"Stream": handler}),))
    server.add_insecure_port(address)
    server.start()
    server.wait_for_termination()


if __name__ == "__main__":
    main()
