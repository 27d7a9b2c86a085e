"""A step's rows from a real daemon, with CUDA's part played by the CPU."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ple_inference.tiny.config import TinyOptions
from ple_inference.tiny.weights import row_numbers
from ple_inference.vllm_plugin import pinned_region
from ple_rpc.client import ClientOptions, TableClient
from ple_rpc.errors import BadRow, TableUnavailable

ROW_BYTES = 320
MAX_IDS = 1024
SLOTS = 4


class Event:
    """Of a stream that is always done, unless a test says otherwise."""

    pending = False

    def record(self) -> None:
        self.is_done = not Event.pending

    def synchronize(self) -> None:
        self.is_done = True

    def query(self) -> bool:
        return self.is_done


class Cudart:
    cudaError = SimpleNamespace(success=0)  # noqa: N815

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.refuses = False

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        if self.refuses:
            return 2
        assert address not in self.registered
        self.registered[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> None:  # noqa: N802
        del self.registered[address]


class Daemon:
    def __init__(self, table: Path, run_dir: Path) -> None:
        self._command = [sys.executable, "-m", "ple_daemon", "serve", str(table), "--run-dir", str(run_dir)]
        self._command += ["--http-address", "127.0.0.1:0", "--log-level", "warning"]
        self.address = f"unix:{run_dir / 'table.sock'}"
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._command)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)


@pytest.fixture(scope="module")
def checkpoint(make_checkpoint: Callable[[TinyOptions], Path]) -> Path:
    return make_checkpoint(TinyOptions(vocab="tiny", dtype="bf16", table_rows_base=2000))


@contextmanager
def running(table: Path, run_dir: Path) -> Iterator[Daemon]:
    daemon = Daemon(table, run_dir)
    try:
        yield daemon
    finally:
        daemon.process.send_signal(signal.SIGCONT)
        daemon.kill()


@pytest.fixture(scope="module")
def steady(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon for all tests that leave it alone."""
    with running(checkpoint, tmp_path_factory.mktemp("r")) as daemon:
        yield daemon


@pytest.fixture
def mortal(checkpoint: Path, tmp_path: Path) -> Iterator[Daemon]:
    with running(checkpoint, tmp_path / "r") as daemon:
        yield daemon


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> Cudart:
    fake = Cudart()
    monkeypatch.setattr(pinned_region, "_cudart", lambda: fake)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Event, "pending", False)
    return fake


@pytest.fixture
def make_source(upstream, fresh_plugin, cudart, monkeypatch):
    upstream("vllm.utils.gpu_sync_debug", gpu_sync_allowed=nullcontext)
    from ple_inference.vllm_plugin import row_source

    monkeypatch.setattr(row_source, "pinned", lambda size, dtype: torch.full((size,), 77, dtype=dtype))
    made = []

    def make(daemon: Daemon, **options):
        options = {"slots": SLOTS, "max_rows_per_slot": MAX_IDS, "hang_check_s": 0.3} | options
        client = TableClient(daemon.address, ClientOptions(**options))
        client.wait_ready(60)
        made.append(row_source.RowSource(client, MAX_IDS, ROW_BYTES, SLOTS))
        return made[-1]

    yield make
    for source in made:
        source.close()


def delivered(source, ids: list[int]) -> list[int]:
    """The numbers of the rows that arrive for `ids`, in a buffer that held something else."""
    rows = torch.full((len(ids), ROW_BYTES), 0xA5, dtype=torch.uint8)
    source.deliver(torch.tensor(ids).view(-1, 1), rows)
    return row_numbers(rows.view(torch.bfloat16)).tolist()


def test_rows_arrive_in_the_order_of_their_ids(make_source, steady, cudart) -> None:
    source = make_source(steady)
    for ids in ([0], [5, 5, 3], list(range(31_900, 31_000, -1)), list(range(MAX_IDS))):
        assert delivered(source, ids) == ids
    (size,) = cudart.registered.values()
    assert size >= SLOTS * MAX_IDS * (ROW_BYTES + 8)


def test_more_steps_than_slots_while_copies_are_under_way(make_source, steady, monkeypatch) -> None:
    monkeypatch.setattr(Event, "pending", True)
    source = make_source(steady)
    for step in range(5 * SLOTS):
        assert delivered(source, [step, 7]) == [step, 7]
    assert len(source._copies) < SLOTS


def test_without_shared_memory_rows_come_over_grpc(make_source, steady, cudart) -> None:
    source = make_source(steady, slots=0)
    for ids in ([9], list(range(500, 900))):
        assert delivered(source, ids) == ids
    assert cudart.registered == {}


def test_a_bad_id_raises_and_leaves_the_buffer(make_source, steady) -> None:
    source = make_source(steady)
    rows = torch.full((2, ROW_BYTES), 0xA5, dtype=torch.uint8)
    for bad in (-1, 1 << 40):
        with pytest.raises(BadRow):
            source.deliver(torch.tensor([[3], [bad]]), rows)
        assert (rows == 0xA5).all()
    assert delivered(source, [3]) == [3]


def test_steps_go_on_across_kills_and_a_stop(make_source, mortal, cudart) -> None:
    source = make_source(mortal)
    assert delivered(source, [1, 2]) == [1, 2]
    (first,) = cudart.registered
    for step in range(3):
        mortal.kill()
        mortal.start()
        assert delivered(source, [100 + step, step]) == [100 + step, step]
    assert len(cudart.registered) == 1  # the regions of dead daemons are let go
    mortal.process.send_signal(signal.SIGSTOP)
    threading.Timer(1.0, os.kill, (mortal.process.pid, signal.SIGCONT)).start()
    assert delivered(source, list(range(600))) == list(range(600))
    assert source._client.stats.reconnects >= 3
    assert first not in cudart.registered or len(cudart.registered) == 1


def test_a_daemon_that_stays_away_ends_the_step(make_source, mortal) -> None:
    source = make_source(mortal, lookup_deadline_s=1.5)
    assert delivered(source, [1]) == [1]
    mortal.kill()
    rows = torch.full((1, ROW_BYTES), 0xA5, dtype=torch.uint8)
    start_s = time.monotonic()
    with pytest.raises(TableUnavailable, match=r"no rows from unix:.* in 1\.5 s"):
        source.deliver(torch.tensor([[4]]), rows)
    assert time.monotonic() - start_s < 30
    assert (rows == 0xA5).all()


def test_a_driver_that_refuses_says_what_to_look_at(make_source, steady, cudart) -> None:
    source = make_source(steady)
    cudart.refuses = True
    with pytest.raises(RuntimeError, match=r"CUDA does not register \d+ bytes of shared memory \(error 2\)"):
        delivered(source, [1])
