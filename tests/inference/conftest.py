"""Checkpoints, daemons and servers that tests share: real processes, one of each kind a session."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2 as httpx
import pytest
import torch

from ple_inference.tiny.config import TinyOptions
from ple_rpc.client import TableClient
from ple_rpc.rundir import TABLE_SOCKET_NAME

torch.set_num_threads(1)
START_DEADLINE_S = 90.0


def wait_until(condition: Callable[[], object], deadline_s: float, what: str) -> None:
    """Poll until `condition()` is true."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {deadline_s} s"
        time.sleep(0.02)


def stop_process(process: subprocess.Popen[str], deadline_s: float = 20.0) -> int:
    """SIGTERM, then the exit status; SIGKILL only for a process that hangs, which is a failure."""
    process.send_signal(signal.SIGTERM)
    try:
        return process.wait(deadline_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise


@dataclass
class Daemon:
    """A ple-daemon that can be killed and started again at the same address."""

    table: Path
    run_dir: Path
    process: subprocess.Popen[str] | None = None

    @property
    def address(self) -> str:
        return f"unix:{self.run_dir / TABLE_SOCKET_NAME}"

    def start(self) -> None:
        command = [sys.executable, "-m", "ple_daemon", "serve", str(self.table)]
        command += ["--run-dir", str(self.run_dir), "--http-address", "127.0.0.1:0"]
        with (self.run_dir / "daemon.log").open("a") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, text=True)

    def wait_ready(self) -> None:
        with TableClient(self.address) as client:
            client.wait_ready(START_DEADLINE_S)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            stop_process(self.process)


@contextmanager
def running_daemon(table: Path) -> Iterator[Daemon]:
    """A ready daemon in a run directory of its own, short enough for a socket."""
    run_dir = Path(tempfile.mkdtemp(prefix="ple-"))
    daemon = Daemon(table, run_dir)
    try:
        daemon.start()
        daemon.wait_ready()
        yield daemon
    finally:
        daemon.stop()
        shutil.rmtree(run_dir)


@dataclass
class Server:
    """A ple-inference serve process."""

    process: subprocess.Popen[str]
    log: Path
    model: str

    @property
    def url(self) -> str:
        match = re.search(r"listening address=(\S+)", self.log.read_text())
        return f"http://{match[1]}" if match else ""

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60)

    def ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        try:
            return bool(self.url) and httpx.get(f"{self.url}/readyz", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def metric(self, name: str) -> float:
        text = httpx.get(f"{self.url}/metrics", timeout=10).text
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


def clean_environment(**extra: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PLE_")}
    return kept | extra


@contextmanager
def running_server(
    model: Path, table: str, log: Path, *, wait: bool = True, **settings: object
) -> Iterator[Server]:
    """A server, ready unless told not to `wait`; `settings` are fields of Settings."""
    environment = clean_environment(
        **{f"PLE_INFERENCE_{name.upper()}": str(value) for name, value in settings.items()}
    )
    command = [sys.executable, "-m", "ple_inference", "serve", "--model", str(model), "--table", table]
    command += ["--http-address", "127.0.0.1:0", "--served-model-name", "tiny-under-test"]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, text=True)
    server = Server(process, log, "tiny-under-test")
    try:
        if wait:
            wait_until(server.ready, START_DEADLINE_S, "inference ready")
        yield server
    finally:
        if process.poll() is None:
            assert stop_process(process) == 0, log.read_text()


@pytest.fixture(scope="session")
def tiny_checkpoint(make_checkpoint: Callable[[TinyOptions], Path]) -> Path:
    """512 ids, bf16, a small table."""
    return make_checkpoint(TinyOptions(vocab="tiny", table_rows_base=1000))


@pytest.fixture(scope="session")
def daemon_of() -> Iterator[Callable[[Path], Daemon]]:
    """One daemon a checkpoint, for tests that leave it alone."""
    with ExitStack() as stack:
        running: dict[Path, Daemon] = {}

        def get(table: Path) -> Daemon:
            if table not in running:
                running[table] = stack.enter_context(running_daemon(table))
            return running[table]

        yield get


@pytest.fixture(scope="session")
def start_daemon() -> Callable[[Path], AbstractContextManager[Daemon]]:
    """For tests that kill theirs."""
    return running_daemon


@pytest.fixture(scope="session")
def start_server() -> Callable[..., AbstractContextManager[Server]]:
    """For tests that need one of their own."""
    return running_server


@pytest.fixture(scope="session")
def server(
    tiny_checkpoint: Path, daemon_of: Callable[[Path], Daemon], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server of the 512-id model."""
    log = tmp_path_factory.mktemp("server") / "log"
    daemon = daemon_of(tiny_checkpoint)
    with running_server(tiny_checkpoint, daemon.address, log, max_num_seqs=2, max_queued=3) as running:
        yield running
