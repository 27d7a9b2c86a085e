"""CUDA's part in fetching rows, played by the CPU, and a real daemon to fetch them from."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import torch

from ple_inference.tiny.weights import row_numbers

ROW_BYTES = 320
MAX_IDS = 1024
SLOTS = 4


class Event:
    """Of a stream that is always done, unless a test says otherwise."""

    pending = False
    waits = 0
    is_done = True  # as CUDA says of an event that was never recorded

    def record(self) -> None:
        self.is_done = not Event.pending

    def synchronize(self) -> None:
        Event.waits += not self.is_done
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

    def stop(self) -> None:
        """SIGSTOP, and wait until it holds: a thread that still runs may answer a ring."""
        self.process.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 30
        while not all(state == "T" for state in self._thread_states()):
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def _thread_states(self) -> list[str]:
        """The letters after the names in /proc, which end with the last parenthesis."""
        tasks = Path(f"/proc/{self.process.pid}/task").iterdir()
        return [(task / "stat").read_text().rpartition(")")[2].split()[0] for task in tasks]


@contextmanager
def running(table: Path, run_dir: Path) -> Iterator[Daemon]:
    daemon = Daemon(table, run_dir)
    try:
        yield daemon
    finally:
        daemon.process.send_signal(signal.SIGCONT)
        daemon.kill()


def delivered(source, ids: list[int]) -> list[int]:
    """The numbers of the rows that arrive for `ids`, in a buffer that held something else."""
    rows = torch.full((len(ids), ROW_BYTES), 0xA5, dtype=torch.uint8)
    source.deliver(torch.tensor(ids).view(-1, 1), rows)
    return row_numbers(rows.view(torch.bfloat16)).tolist()
