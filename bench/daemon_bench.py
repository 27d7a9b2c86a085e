"""What the daemon's ways of doing things gain, as ratios within one run.

    python bench/daemon_bench.py                    all figures
    python bench/daemon_bench.py hash transport     some of them
    python bench/daemon_bench.py cold --rounds 9    more rounds
    python bench/daemon_bench.py start              start to ready, and memory, with a sparse table of 95 GiB

Both sides of a ratio take turns in random order, and figures are medians. Cold reads use rows that this run
has not read before, dropped from the cache and checked with mincore. Carry ratios, never times, to another
machine.
"""

import argparse
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import torch
from tqdm import tqdm

from ple_daemon.bench import MIN_ROUNDS, Effort, measure
from ple_daemon.contest import HEADING, Figure, ratio, take_turns
from ple_daemon.flat_file import SegmentSum, describe, sidecar_path
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
DECODE_ROWS = 16
CHUNK_ROWS = 8_192
WARM_ROWS = 200_000
MESSAGE_BYTES = 16 * 1024 * 1024
DEADLINE_S = 60.0
FIGURES = ("hash", "start", "cold", "transport")

Ids = np.ndarray


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="*", default=list(FIGURES), help=", ".join(FIGURES))
    parser.add_argument("--rounds", type=int, default=5, help="turns of each side (5)")
    parser.add_argument("--table-mib", type=int, default=6144, help="size of the table made for it (6144)")
    options = parser.parse_args()
    unknown = set(options.what) - set(FIGURES)
    if unknown or options.rounds < 1 or options.table_mib < 4096:
        parser.error(
            f"unknown figure {unknown}" if unknown else "rounds >= 1 and table-mib >= 4096 are needed"
        )
    print(HEADING)
    if "hash" in options.what:
        hash_figures(options.rounds)
    if "start" in options.what:
        start_figures(options.rounds)
    if "cold" in options.what or "transport" in options.what:
        path = make_table(options.table_mib)
        if "cold" in options.what:
            cold_figures(path, options.rounds)
        if "transport" in options.what:
            transport_figures(path, options.rounds)


def show(figure: str, slow: tuple[str, float], fast: tuple[str, float], bar: str) -> None:
    print(ratio(figure, slow, fast, bar), flush=True)


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
    """The same figures as `ple-daemon bench`, on a table made for it."""
    for figure in measure(path, Effort(rounds=max(rounds, MIN_ROUNDS))):
        print(figure, flush=True)


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
    write_sidecar(path, constants, rows)
    return path


def write_sidecar(path: Path, constants: HashConstants, rows: int) -> None:
    layout = TableLayout(RowType.BF16, ROW_BYTES // 2, rows, b"", constants, (Segment(path, 0, rows),))
    with Table(layout) as table:
        fields = describe(layout, table.fingerprint.hex(), "", [SegmentSum(path.name, rows, "")])
    sidecar_path(path).write_text(json.dumps(fields))


# -- start -------------------------------------------------------------------------------------------------


def start_figures(rounds: int) -> None:
    """Seconds from the command to ready, and anonymous memory then, with a table of the real size."""
    with tempfile.TemporaryDirectory(prefix="ple-bench-") as folder:
        path = make_sparse_table(Path(folder))
        cache = Path(folder) / "kernels"
        first_s, _ = time_start(path, cache)
        again = [time_start(path, cache) for _ in range(rounds)]
    print(Figure("start to ready, kernels to compile, s", first_s, "<= 15", "once"))
    ready_s = statistics.median(seconds for seconds, _ in again)
    print(Figure("start to ready, kernels cached, s", ready_s, "<= 3", f"median of {rounds}"))
    anonymous_mib = max(mib for _, mib in again)
    print(Figure("anonymous memory when ready, MiB", anonymous_mib, "<= 300", "largest"), flush=True)


def make_sparse_table(folder: Path) -> Path:
    """A flat file of the released table's size, 95.4 GiB, of rows of zeros that take no space."""
    constants = derive(vocab_size=248_320, eos_token_id=248_044, ngram_vocab_size_base=20_000_000)
    rows = padded_rows(constants.used_rows, 128)
    path = folder / "sparse.ple"
    with path.open("wb") as file:
        file.truncate(rows * ROW_BYTES)
    write_sidecar(path, constants, rows)
    return path


def time_start(table: Path, cache: Path) -> tuple[float, float]:
    """Seconds until a daemon answers lookups, and MiB of anonymous memory that it then holds."""
    start_s = time.perf_counter()
    with running_daemon(table, "--cache-dir", str(cache)) as daemon:
        ready_s = time.perf_counter() - start_s
        status = Path(f"/proc/{daemon.pid}/status").read_text()
    return ready_s, int(status.split("RssAnon:")[1].split()[0]) / 1024


# -- transport ---------------------------------------------------------------------------------------------


def transport_figures(path: Path, rounds: int) -> None:
    with open_table(path) as table, running_daemon(path) as daemon:
        table.lookup(np.arange(WARM_ROWS))
        options = [
            ("grpc.max_receive_message_length", MESSAGE_BYTES),
            ("grpc.max_send_message_length", MESSAGE_BYTES),
        ]
        with grpc.insecure_channel(daemon.address, options=options) as channel:
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


@dataclass(frozen=True)
class Daemon:
    address: str
    pid: int


@contextmanager
def running_daemon(path: Path, *options: str) -> Iterator[Daemon]:
    """A daemon process that serves the table, ready."""
    with tempfile.TemporaryDirectory(prefix="ple-bench-") as folder:
        command = [sys.executable, "-m", "ple_daemon", "serve", str(path), "--run-dir", folder]
        command += ["--http-address", "127.0.0.1:0", "--log-level", "error", *options]
        process = subprocess.Popen(command)
        address = f"unix:{folder}/table.sock"
        try:
            with TableClient(address) as client:
                client.wait_ready(DEADLINE_S)
            yield Daemon(address, process.pid)
        finally:
            process.terminate()
            process.wait(DEADLINE_S)


if __name__ == "__main__":
    main()
