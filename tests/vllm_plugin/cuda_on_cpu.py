"""CUDA's part in fetching rows, played by the CPU, and a real daemon to fetch them from."""

from __future__ import annotations

import ctypes
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from ple_inference.tiny.weights import row_numbers

ROW_BYTES = 320
MAX_IDS = 1024
SLOTS = 4


class Stream:
    """Does what it is given in order, in a thread of its own, and nothing on the thread that gives it."""

    def __init__(self, device: object = None) -> None:
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="cuda-stream", daemon=True)
        self._thread.start()
        Stream.made.append(self)

    made: ClassVar[list[Stream]] = []

    def submit(self, work: Callable[[], object]) -> None:
        self._work.put(work)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def close(self) -> None:
        self._work.put(None)
        self._thread.join(30)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()


class Event:
    """A mark on a stream. A wait is for the last record before it, as CUDA has it."""

    touched_by: ClassVar[set[str]] = set()
    """Names of the threads that made, used or destroyed one."""

    def __init__(self, *, external: bool = False) -> None:
        self._passed: threading.Event | None = None
        self._touched_by = Event.touched_by  # this test's: a later one may collect what is left
        self._touch()

    @property
    def is_made(self) -> bool:
        """PyTorch makes CUDA's event only when it is recorded."""
        return self._passed is not None

    def __del__(self) -> None:
        self._touch()

    def record(self, stream: Stream | None = None) -> None:
        self._touch()
        self._passed = threading.Event()
        (stream or current_stream()).submit(self._passed.set)

    def wait(self, stream: Stream | None = None) -> None:
        self._touch()
        if self._passed is not None:
            passed = self._passed
            (stream or current_stream()).submit(lambda: passed.wait(60))

    def synchronize(self) -> None:
        self._touch()
        assert self._passed is None or self._passed.wait(60)

    def query(self) -> bool:
        self._touch()
        return self._passed is None or self._passed.is_set()

    def _touch(self) -> None:
        self._touched_by.add(threading.current_thread().name)


class Cuda:
    """Streams of this thread, and copies and host functions that run on them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._default = Stream()
        self._current = self._default
        self._copy = torch.Tensor.copy_
        for name in ("Stream", "Event"):
            monkeypatch.setattr(torch.cuda, name, globals()[name])
        monkeypatch.setattr(torch.cuda, "current_stream", self.current_stream)
        monkeypatch.setattr(torch.cuda, "set_stream", self.set_stream)
        monkeypatch.setattr(torch.cuda, "stream", self.stream)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
        cuda = self

        def copy_(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
            if not non_blocking:
                return cuda._copy(target, source)
            cuda._current.submit(lambda: cuda._copy(target, source))
            return target

        monkeypatch.setattr(torch.Tensor, "copy_", copy_)

    def current_stream(self, device: object = None) -> Stream:
        return self._current

    def set_stream(self, stream: Stream) -> None:
        self._current = stream

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def launch_host_function(self, function: int, argument: int) -> None:
        """ctypes lets other threads run meanwhile."""
        call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)
        self._current.submit(lambda: call(argument))


def current_stream() -> Stream:
    return torch.cuda.current_stream()


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
    """The numbers of the rows that a forward finds for `ids`, in a buffer that held something else."""
    rows = poisoned(len(ids))
    source.deliver(torch.tensor(ids).view(-1, 1), rows)
    source.rows_there.wait()
    torch.cuda.current_stream().synchronize()
    return row_numbers(rows.view(torch.bfloat16)).tolist()


def poisoned(count: int) -> torch.Tensor:
    """Room for `count` rows that holds none."""
    return torch.full((count, ROW_BYTES), 0xA5, dtype=torch.uint8)
