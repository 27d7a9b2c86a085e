"""What the daemon's ways of doing things gain, as ratios within one run.

    python bench/daemon_bench.py                    all figures
    python bench/daemon_bench.py hash transport     some of them
    python bench/daemon_bench.py cold --rounds 9    more rounds

Both sides of a ratio take turns in random order, and figures are medians. Cold reads use rows that this run
has not read before, dropped from the cache and checked with mincore. Carry ratios, never times, to another
machine.
"""

import argparse
import ctypes
import json
import mmap
import os
import queue
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import numpy as np
import torch
from tqdm import tqdm

from ple_daemon.flat_file import SegmentSum, describe, read_sidecar, sidecar_path
from ple_daemon.gather import Advice
from ple_daemon.hash_constants import HashConstants, derive, padded_rows
from ple_daemon.ngram_hash import NgramHash
from ple_daemon.source import open_table
from ple_daemon.table import Table
from ple_daemon.table_format import RowType, Segment, TableLayout
from ple_rpc.client import TableClient
from ple_rpc.table.v1.table_service_pb2 import LookupRequest, LookupStreamRequest
from ple_rpc.table.v1.table_service_pb2_grpc import TableServiceStub

FOLDER = Path(__file__).parent.parent / "var" / "bench"
ROW_BYTES = 320
HASH_TOKENS = 42_000
COLD_ROWS = 4_096
DECODE_ROWS = 16
DECODE_STEPS = 40
CHUNK_ROWS = 8_192
WARM_ROWS = 200_000
MESSAGE_BYTES = 16 * 1024 * 1024
DEADLINE_S = 60.0

Contest = dict[str, Callable[[], object]]
Ids = np.ndarray


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "what", nargs="*", default=["hash", "cold", "transport"], help="hash, cold, transport"
    )
    parser.add_argument("--rounds", type=int, default=7, help="turns of each side (7)")
    parser.add_argument("--table-mib", type=int, default=1536, help="size of the table made for it (1536)")
    options = parser.parse_args()
    unknown = set(options.what) - {"hash", "cold", "transport"}
    if unknown or options.rounds < 1 or options.table_mib < 256:
        parser.error(
            f"unknown figure {unknown}" if unknown else "rounds >= 1 and table-mib >= 256 are needed"
        )
    print(f"{'figure':58} {'ratio':>7} {'expected':>9}   sides (median)")
    if "hash" in options.what:
        hash_figures(options.rounds)
    if "cold" in options.what or "transport" in options.what:
        path = make_table(options.table_mib)
        if "cold" in options.what:
            cold_figures(path, options.rounds)
        if "transport" in options.what:
            transport_figures(path, options.rounds)


def take_turns(contest: Contest, rounds: int, prepare: Callable[[], None] = lambda: None) -> dict[str, float]:
    """Median seconds of each side; `prepare` runs untimed before every turn."""
    times: dict[str, list[float]] = {side: [] for side in contest}
    for _ in range(rounds):
        for side in random.sample(list(contest), len(contest)):
            prepare()
            start_s = time.perf_counter()
            contest[side]()
            times[side].append(time.perf_counter() - start_s)
    return {side: statistics.median(taken) for side, taken in times.items()}


def show(figure: str, slow: tuple[str, float], fast: tuple[str, float], expected: str) -> None:
    sides = f"{slow[0]} {slow[1] * 1e3:.3f} ms, {fast[0]} {fast[1] * 1e3:.3f} ms"
    print(f"{figure:58} {slow[1] / fast[1]:7.2f} {expected:>9}   {sides}", flush=True)


# -- hash --------------------------------------------------------------------------------------------------


def hash_figures(rounds: int) -> None:
    theirs, constants = transformers_hash()
    tokens = np.random.default_rng(1).integers(0, 248_320, HASH_TOKENS)
    tokens[::97] = constants.eos_token_id
    ours, batch = NgramHash(constants), torch.from_numpy(tokens)[None]
    if not np.array_equal(ours.row_ids(tokens).reshape(-1), theirs(batch).numpy().reshape(-1)):
        raise SystemExit("the two hashes differ")
    taken = take_turns(
        {"torch": lambda: theirs(batch), "daemon": lambda: all(rows.size for rows in ours.pieces(tokens))},
        5 * rounds,
    )
    show(
        f"hash of {HASH_TOKENS:,} tokens, Transformers / daemon",
        ("torch", taken["torch"]), ("daemon", taken["daemon"]), ">= 8",
    )  # fmt: skip


def transformers_hash() -> tuple[Callable[[torch.Tensor], torch.Tensor], HashConstants]:
    """Transformers' own module with its table taken out, int64 tokens [1, n] to row ids; our constants."""
    from transformers import Qwen4ExpTextConfig
    from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextNGramEmbedding

    class Ids(torch.nn.Module):
        """Stands in for the table: hands the ids back."""

        weight = torch.zeros(1)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return ids

    # A small base keeps the table that the module allocates, and that is thrown away, small.
    config = Qwen4ExpTextConfig(
        vocab_size=248_320, eos_token_id=248_044, ple_layer_ids=[1], ngram_vocab_size_base=20_000
    )
    module = Qwen4ExpTextNGramEmbedding(config, embedding_dim=16, layer_idx=0)
    module.ngram_embedding = Ids()
    constants = derive(vocab_size=248_320, eos_token_id=248_044, ngram_vocab_size_base=20_000)
    return lambda tokens: module(tokens, None), constants


# -- cold reads --------------------------------------------------------------------------------------------


def cold_figures(path: Path, rounds: int) -> None:
    layout = read_sidecar(path).layout
    with Table(layout) as advised, Table(layout, Advice.NONE) as plain:
        fresh = FreshRows(path, [advised, plain])

        def gather(table: Table) -> Callable[[], object]:
            return lambda: table.lookup(fresh.ids)

        def steps(table: Table) -> Callable[[], object]:
            return lambda: [table.lookup(ids) for ids in fresh.ids.reshape(-1, DECODE_ROWS)]

        taken = take_turns(
            {"plain": gather(plain), "advised": gather(advised)}, rounds, lambda: fresh.draw(COLD_ROWS)
        )
        show(
            f"cold gather of {COLD_ROWS:,} rows, plain / advised",
            ("plain", taken["plain"]), ("advised", taken["advised"]), ">= 2.5",
        )  # fmt: skip
        taken = take_turns(
            {"plain": steps(plain), "advised": steps(advised)},
            rounds,
            lambda: fresh.draw(DECODE_STEPS * DECODE_ROWS),
        )
        show(
            f"cold decode step of {DECODE_ROWS} rows, plain / advised",
            ("plain", taken["plain"] / DECODE_STEPS), ("advised", taken["advised"] / DECODE_STEPS), ">= 2",
        )  # fmt: skip


class FreshRows:
    """Rows on pages that were never drawn before, dropped from the page cache and both mappings."""

    def __init__(self, path: Path, tables: list[Table]) -> None:
        self._path, self._tables = path, tables
        pages = path.stat().st_size // mmap.PAGESIZE - 1
        self._pages = np.random.default_rng().permutation(pages)
        self._used = 0
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.ids: Ids = np.zeros(0, np.int64)

    def draw(self, count: int) -> None:
        if self._used + count > len(self._pages):
            raise SystemExit("out of fresh pages: give a larger --table-mib or fewer --rounds")
        pages = self._pages[self._used : self._used + count]
        self._used += count
        self.ids = -(-pages * mmap.PAGESIZE // ROW_BYTES)  # the first row that starts in the page
        self._drop()
        if resident := int(self._is_cached(pages).sum()):
            raise SystemExit(f"{resident} of {count} pages are still cached: this is no cold read")

    def draw_uncached(self, count: int) -> None:
        """The same beside another process that maps the file: passes over pages that cannot be dropped."""
        self._drop()
        rest = self._pages[self._used :]
        chosen = np.flatnonzero(~self._is_cached(rest))[:count]
        if chosen.size < count:
            raise SystemExit("out of fresh pages: give a larger --table-mib or fewer --rounds")
        self._used += int(chosen[-1]) + 1
        self.ids = -(-rest[chosen] * mmap.PAGESIZE // ROW_BYTES)

    def _drop(self) -> None:
        for table in self._tables:
            self._libc.madvise(ctypes.c_void_p(table.first_address), ctypes.c_size_t(table.size_bytes), 4)
        fd = os.open(self._path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)

    def _is_cached(self, pages: Ids) -> np.ndarray:
        table = self._tables[0]
        seen = np.zeros(table.size_bytes // mmap.PAGESIZE, np.uint8)
        self._libc.mincore(
            ctypes.c_void_p(table.first_address),
            ctypes.c_size_t(table.size_bytes),
            ctypes.c_void_p(seen.ctypes.data),
        )
        return (seen[pages] & 1).astype(bool)


def make_table(size_mib: int) -> Path:
    """A flat file of about `size_mib` whose rows are all distinct, made once and kept under var/bench/."""
    path = FOLDER / f"table-{size_mib}.ple"
    if path.is_file() and sidecar_path(path).is_file():
        return path
    constants = derive(
        vocab_size=248_320, eos_token_id=248_044, ngram_vocab_size_base=size_mib * 2**20 // ROW_BYTES // 16
    )
    rows = padded_rows(constants.used_rows, 128)
    FOLDER.mkdir(parents=True, exist_ok=True)
    block = np.random.default_rng(0).integers(0, 256, (16_384, ROW_BYTES), np.uint8)
    with path.open("wb") as file:
        for first in tqdm(range(0, rows, len(block)), desc=path.name, leave=False):
            block[:, :8] = np.arange(first, first + len(block), dtype="<i8").view(np.uint8).reshape(-1, 8)
            file.write(block[: rows - first].tobytes())
        file.flush()
        os.fsync(file.fileno())
    layout = TableLayout(RowType.BF16, ROW_BYTES // 2, rows, b"", constants, (Segment(path, 0, rows),))
    with Table(layout) as table:
        fields = describe(layout, table.fingerprint.hex(), "", [SegmentSum(path.name, rows, "")])
    sidecar_path(path).write_text(json.dumps(fields))
    return path


# -- transport ---------------------------------------------------------------------------------------------


def transport_figures(path: Path, rounds: int) -> None:
    with open_table(path) as table, running_daemon(path) as address:
        table.lookup(np.arange(WARM_ROWS))
        options = [
            ("grpc.max_receive_message_length", MESSAGE_BYTES),
            ("grpc.max_send_message_length", MESSAGE_BYTES),
        ]
        with grpc.insecure_channel(address, options=options) as channel:
            stub = TableServiceStub(channel)
            stream = LookupStream(stub)
            for start in range(0, WARM_ROWS, CHUNK_ROWS):  # map the rows in the daemon too
                stub.Lookup(request(np.arange(start, min(start + CHUNK_ROWS, WARM_ROWS))), timeout=DEADLINE_S)
            for count, calls in ((DECODE_ROWS, 200), (CHUNK_ROWS, 10)):
                compare_transports(table, stub, stream, count, calls, rounds)
            stream.close()


def compare_transports(
    table: Table, stub: TableServiceStub, stream: "LookupStream", count: int, calls: int, rounds: int
) -> None:
    rng = np.random.default_rng()
    batches: list[Ids] = []

    def draw() -> None:
        batches[:] = [rng.integers(0, WARM_ROWS, count) for _ in range(calls)]

    taken = take_turns(
        {
            "in-process": lambda: [table.lookup(ids) for ids in batches],
            "unary": lambda: [stub.Lookup(request(ids), timeout=DEADLINE_S).rows for ids in batches],
            "stream": lambda: [stream.lookup(ids) for ids in batches],
        },
        rounds,
        draw,
    )
    for side in ("unary", "stream"):
        show(
            f"warm lookup of {count:,} rows, gRPC {side} / in-process",
            (side, taken[side] / calls), ("in-process", taken["in-process"] / calls), "-",
        )  # fmt: skip


def request(ids: Ids) -> LookupRequest:
    return LookupRequest(row_ids_le64=ids.astype("<i8").tobytes())


class LookupStream:
    """One long-lived bidirectional stream, one lookup at a time."""

    def __init__(self, stub: TableServiceStub) -> None:
        self._requests: queue.SimpleQueue[LookupStreamRequest | None] = queue.SimpleQueue()
        self._answers = stub.LookupStream(iter(self._requests.get, None), timeout=600)

    def lookup(self, ids: Ids) -> bytes:
        self._requests.put(LookupStreamRequest(lookup=request(ids)))
        parts = []
        for answer in self._answers:
            parts.append(answer.rows)
            if answer.last:
                break
        return b"".join(parts)

    def close(self) -> None:
        self._requests.put(None)


@contextmanager
def running_daemon(path: Path) -> Iterator[str]:
    """Address of a daemon process that serves the table."""
    with tempfile.TemporaryDirectory(prefix="ple-bench-") as folder:
        command = [sys.executable, "-m", "ple_daemon", "serve", str(path), "--run-dir", folder]
        process = subprocess.Popen([*command, "--http-address", "127.0.0.1:0", "--log-level", "error"])
        address = f"unix:{folder}/table.sock"
        try:
            with TableClient(address) as client:
                client.wait_ready(DEADLINE_S)
            yield address
        finally:
            process.terminate()
            process.wait(DEADLINE_S)


if __name__ == "__main__":
    main()
