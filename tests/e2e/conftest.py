"""The whole of Triplex, started as `make run` starts it, on ports and folders of its own."""

import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import openai
import psutil
import pytest
from http_get import http_get
from waiting import wait_for

CHECKOUT = Path(__file__).resolve().parents[2]
KEY = "sk-end-to-end"
MODEL = "triplex-tiny"


def free_addresses(count: int) -> list[str]:
    """Addresses that nobody listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    finally:
        for each in sockets:
            each.close()


def read_metric(url: str, name: str) -> float:
    """The value of one unlabelled sample of `/metrics`."""
    found = re.search(rf"^{name} (\S+)$", http_get(f"{url}/metrics", KEY)[1], re.MULTILINE)
    assert found, f"{url}/metrics has no {name}"
    return float(found.group(1))


class Stack:
    """One `deploy/local/run.py` and what it started."""

    def __init__(self, model: Path, folder: Path) -> None:
        gateway, inference, daemon = free_addresses(3)
        self.gateway, self.inference, self.daemon = (f"http://{a}" for a in (gateway, inference, daemon))
        self.run_dir = folder / "run"
        # A user's folders may lie deep and have any name: only sockets need short paths.
        self.log_dir = folder.joinpath(*["a folder; with a 'rather' long name"] * 7)
        venv = folder / "it's my venv"
        folder.mkdir(exist_ok=True)
        venv.symlink_to(sys.prefix)
        self.command = [
            *(str(venv / "bin/python"), str(CHECKOUT / "deploy/local/run.py"), "--model", str(model)),
            *("--gateway-address", gateway, "--inference-address", inference),
            *("--daemon-address", daemon, "--run-dir", str(self.run_dir), "--log-dir", str(self.log_dir)),
        ]
        self.lines: list[str] = []
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None

    def launch(self) -> None:
        """Start, and return before anything is ready."""
        self._process = subprocess.Popen(
            self.command,
            env=os.environ | {"PLE_GATEWAY_API_KEYS": KEY},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, args=(self._process,), daemon=True)
        self._reader.start()

    def start(self) -> None:
        """Start, and return when all three services are ready."""
        self.launch()
        wait_for(lambda: self._welcomed() or self._process.poll() is not None, "welcome", 150)
        assert self._welcomed(), "\n".join([*self.lines, *self._logs()])

    def _read(self, process: subprocess.Popen[str]) -> None:
        for line in process.stdout:
            self.lines.append(line.rstrip("\n"))

    def _welcomed(self) -> bool:
        return any("Triplex answers at" in line for line in self.lines)

    def _logs(self) -> list[str]:
        return [f"{path.name}: {path.read_text()[-2000:]}" for path in self.log_dir.glob("*.log")]

    def stop(self, number: signal.Signals = signal.SIGINT) -> int:
        """What Ctrl-C does; the exit status."""
        self._process.send_signal(number)
        return self.ended()

    def ended(self) -> int:
        """The exit status, once the process is gone and all that it said is read."""
        status = self._process.wait(120)
        self._reader.join(10)
        self._process.stdout.close()
        return status

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def service(self, name: str) -> psutil.Process:
        """The process of ple_daemon, ple_inference or ple_gateway."""
        return wait_for(lambda: self._find(name), f"process of {name}")

    def _find(self, name: str) -> psutil.Process | None:
        for process in self.processes():
            try:
                if process.cmdline()[1:4] == ["-m", name, "serve"]:
                    return process
            except psutil.NoSuchProcess:
                continue
        return None

    def processes(self) -> list[psutil.Process]:
        """Every process that lives by this run, supervisord included: they all know its run directory."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("TRIPLEX_RUN_DIR") == str(self.run_dir):
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue
        return found

    def client(self, **options) -> openai.OpenAI:
        options = {"api_key": KEY, "max_retries": 0, "timeout": 120} | options
        return openai.OpenAI(base_url=f"{self.gateway}/v1", **options)

    def wait_ready(self, url: str, deadline_s: float = 90.0) -> dict:
        def ready() -> dict | None:
            try:
                status, body = http_get(f"{url}/readyz", KEY)
            except OSError:
                return None
            return json.loads(body) if status == 200 else None

        return wait_for(ready, f"readiness of {url}", deadline_s, 0.1)


@pytest.fixture(scope="session")
def checkpoint(real_checkpoint) -> Path:
    """The model of `make run`."""
    return real_checkpoint


@pytest.fixture(scope="session")
def shared_stack(checkpoint, tmp_path_factory) -> Iterator[Stack]:
    stack = Stack(checkpoint, tmp_path_factory.mktemp("stack"))
    stack.start()
    yield stack
    assert stack.stop() == 0, "\n".join(stack.lines)
    assert stack.processes() == []


@pytest.fixture
def stack(shared_stack) -> Stack:
    """The shared stack, all three services ready."""
    for url in (shared_stack.daemon, shared_stack.inference, shared_stack.gateway):
        shared_stack.wait_ready(url)
    return shared_stack


@pytest.fixture
def client(stack) -> Iterator[openai.OpenAI]:
    with stack.client() as client:
        yield client


@pytest.fixture
def metric() -> Callable[[str, str], float]:
    return read_metric


@pytest.fixture
def new_stack(tmp_path) -> Iterator[Callable[[Path], Stack]]:
    """Makes another stack, not started yet, and ends it with the test."""
    made: list[Stack] = []

    def make(model: Path) -> Stack:
        made.append(Stack(model, tmp_path / f"stack{len(made)}"))
        return made[-1]

    yield make
    for stack in made:
        if stack.running:
            stack.stop()


@pytest.fixture
def scramble() -> Callable[[Path, Path], Path]:
    """Copies a checkpoint with the rows of every table shard in reverse order."""
    return reverse_table_rows


def reverse_table_rows(checkpoint: Path, folder: Path) -> Path:
    """A copy under the same name: all weights equal, all rows right, each in another row's place."""
    copy = folder / checkpoint.name
    shutil.copytree(checkpoint, copy)
    for path in copy.glob("*.safetensors"):
        with path.open("r+b") as file:
            header_bytes = struct.unpack("<Q", file.read(8))[0]
            header = json.loads(file.read(header_bytes))
            for name, tensor in header.items():
                if ".ngram_embedding.shard_" in name:
                    begin, end = tensor["data_offsets"]
                    file.seek(8 + header_bytes + begin)
                    rows = np.frombuffer(file.read(end - begin), np.uint8).reshape(tensor["shape"][0], -1)
                    file.seek(8 + header_bytes + begin)
                    file.write(rows[::-1].tobytes())
    return copy
