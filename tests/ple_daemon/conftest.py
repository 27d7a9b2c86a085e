"""Checkpoints, open tables and real daemon processes for the tests of ple-daemon."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import grpc
import numpy as np
import pytest
from numba.core.event import Listener, register
from numba.np import arrayobj  # noqa: F401 - registers np.empty, which must not be replaced yet

# Test modules share ple_checkpoint.py, and importlib mode adds no folder to the path.
sys.path.insert(0, str(Path(__file__).parent))

from ple_checkpoint import Checkpoint

from ple_daemon import kernel_cache
from ple_rpc.table.v1 import table_service_pb2_grpc

# Before any module with kernels, as the command does.
kernel_cache.prepare(None)

DEADLINE_S = 60.0


def eventually(condition: Callable[[], object], what: str, deadline_s: float = DEADLINE_S) -> object:
    """The first true value of `condition`; fails the test at the deadline."""
    end = time.monotonic() + deadline_s
    while not (value := condition()):
        assert time.monotonic() < end, f"not within {deadline_s} s: {what}"
        time.sleep(0.01)
    return value


def names(folder: Path) -> list[str]:
    """What lies in the folder, sorted."""
    return sorted(path.name for path in folder.iterdir())


class Daemon:
    """A `ple-daemon serve` process with its log, socket and HTTP port."""

    def __init__(
        self,
        arguments: list[str],
        run_dir: Path,
        log: Path,
        environment: dict[str, str],
        launcher: Sequence[str] = ("-m", "ple_daemon"),
    ) -> None:
        self.run_dir = run_dir
        self.socket = run_dir / "table.sock"
        self._log = log
        command = [sys.executable, *launcher, "serve", *arguments, "--run-dir", str(run_dir)]
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [*command, "--http-address", "127.0.0.1:0"], stderr=stderr, env=os.environ | environment
            )
        self._channel: grpc.Channel | None = None

    @property
    def log(self) -> str:
        return self._log.read_text()

    def wait_ready(self) -> "Daemon":
        # The first start after a change compiles every kernel.
        is_up = lambda: "ready socket=" in self.log or self.process.poll() is not None  # noqa: E731
        eventually(is_up, "ready", 3 * DEADLINE_S)
        assert "ready socket=" in self.log, self.log
        return self

    @property
    def http(self) -> str:
        found = re.search(r"http_port=(\d+)", self.log)
        assert found, self.log
        return f"http://127.0.0.1:{found[1]}"

    @property
    def stub(self) -> table_service_pb2_grpc.TableServiceStub:
        return table_service_pb2_grpc.TableServiceStub(self.channel)

    @property
    def channel(self) -> grpc.Channel:
        if self._channel is None:
            limit = 16 * 1024 * 1024
            options = [("grpc.max_receive_message_length", limit), ("grpc.max_send_message_length", limit)]
            self._channel = grpc.insecure_channel(f"unix:{self.socket}", options=options)
        return self._channel

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(self.http + path, timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def health(self) -> tuple[int, dict]:
        status, body = self.get("/readyz")
        return status, json.loads(body)

    def metric(self, name: str) -> float:
        found = re.search(rf"^{re.escape(name)} (\S+)$", self.get("/metrics")[1], re.MULTILINE)
        assert found, name
        return float(found[1])

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        return self.process.wait(DEADLINE_S)

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(DEADLINE_S)


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """A private folder whose path is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="ple-") as folder:
        yield Path(folder) / "run"


@pytest.fixture
def start(run_dir: Path, tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    """Starts daemons on the test's run directory; all are gone afterwards."""
    daemons: list[Daemon] = []

    def begin(
        table: Path, *arguments: str, launcher: Sequence[str] = ("-m", "ple_daemon"), **environment: str
    ) -> Daemon:
        log = tmp_path / f"daemon-{len(daemons)}.log"
        daemons.append(Daemon([str(table), *arguments], run_dir, log, environment, launcher))
        return daemons[-1]

    yield begin
    for daemon in daemons:
        daemon.close()


REAL_WIDTH = Checkpoint(width=160, base=2000)


@pytest.fixture(scope="session")
def shared_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of 320 bytes as in the real table, 10 MiB in four shards and three files. Not to be changed."""
    return REAL_WIDTH.write(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="session")
def shared_rows() -> np.ndarray:
    """The rows of `shared_checkpoint`, uint8 [rows, 320]."""
    return REAL_WIDTH.table()


@pytest.fixture(scope="module")
def daemon(shared_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One ready daemon on `shared_checkpoint` for the tests of a module."""
    run_dir = Path(tempfile.mkdtemp(prefix="ple-"))
    log = tmp_path_factory.mktemp("log") / "daemon.log"
    process = Daemon([str(shared_checkpoint)], run_dir, log, {})
    try:
        yield process.wait_ready()
    finally:
        process.close()
        shutil.rmtree(run_dir)


@pytest.fixture
def command() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `ple-daemon` to its end."""

    def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "ple_daemon", *map(str, arguments)],
            capture_output=True, text=True, timeout=DEADLINE_S, check=False, env=os.environ | environment,
        )  # fmt: skip

    return run


_empty = np.empty


def _poisoned(*arguments: object, **options: object) -> np.ndarray:
    made = _empty(*arguments, **options)
    if made.dtype != object:  # matplotlib's, which have no bytes to be seen
        made.view(np.uint8).reshape(-1)[:] = 0xA5
    return made


class _RealEmpty(Listener):
    """numba looks np.empty up when it compiles, and keeps what it finds for daemons: the real one."""

    def __init__(self) -> None:
        self._before: list[object] = []  # compilations nest

    def on_start(self, event: object) -> None:
        self._before.append(np.empty)
        np.empty = _empty

    def on_end(self, event: object) -> None:
        np.empty = self._before.pop()


register("numba:compile", _RealEmpty())


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """np.empty is filled with a pattern, so that bytes that nobody wrote are noticed."""
    monkeypatch.setattr(np, "empty", _poisoned)
