"""Checkpoints, a daemon, GPUs and an executable `vllm` as the launcher finds them on a machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ple_inference.tiny.config import TinyOptions
from ple_rpc.client import TableClient

sys.path.insert(0, str(Path(__file__).parent))  # for released_layout and refused_case

import released_layout
from refused_case import Case

CHECKOUT = Path(__file__).resolve().parents[2]
START_DEADLINE_S = 90.0

# What the real ones print. The launcher asks nvidia-smi, and becomes vllm.
NVIDIA_SMI = '#!/bin/sh\nprintf "%b" "$FAKE_GPUS"\n'
VLLM = """#!{python}
import json, os, signal, sys
def end(number, frame):
    sys.exit(40 + number)
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, end)
environment = {{name: value for name, value in os.environ.items() if name.startswith("VLLM_")}}
print(json.dumps({{"pid": os.getpid(), "argv": sys.argv[1:], "environment": environment}}), flush=True)
if os.environ.get("FAKE_EXIT"):
    sys.exit(int(os.environ["FAKE_EXIT"]))
while True:
    signal.pause()
"""


@pytest.fixture(scope="session")
def planner_path() -> Path:
    """vLLM's Python files and what its planner imports. Made by `make test`; its absence fails."""
    path = CHECKOUT / "var/vllm-planner"
    if not (path / "ready").exists():
        pytest.fail("var/vllm-planner is not there: run `make test`, or `make var/vllm-planner/ready`")
    return path


@pytest.fixture(scope="session")
def tiny_checkpoint(make_checkpoint: Callable[[TinyOptions], Path]) -> Path:
    """512 ids, bf16, a small table."""
    return make_checkpoint(TinyOptions(vocab="tiny", table_rows_base=1000))


@pytest.fixture(scope="session")
def deep_checkpoint(make_checkpoint: Callable[[TinyOptions], Path]) -> Path:
    """The tiny one with 20 layers, every fourth of full attention: two and three stages have some each."""
    return make_checkpoint(TinyOptions(vocab="tiny", table_rows_base=1000, layers=20))


@pytest.fixture(scope="session")
def daemon_address(tiny_checkpoint: Path) -> Iterator[str]:
    """A daemon that serves the tiny checkpoint's table."""
    with tempfile.TemporaryDirectory(prefix="ple-") as run_dir:
        command = [sys.executable, "-m", "ple_daemon", "serve", str(tiny_checkpoint)]
        command += ["--run-dir", run_dir, "--http-address", "127.0.0.1:0"]
        with (Path(run_dir) / "log").open("w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            address = f"unix:{run_dir}/table.sock"
            with TableClient(address) as client:
                client.wait_ready(START_DEADLINE_S)
            yield address
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            finally:
                process.kill()
                process.wait()


@dataclass
class Machine:
    """Starts `ple-inference` where GPUs, nvidia-smi and vllm are what a test says."""

    folder: Path
    vllm: Path

    def gpus(
        self, count: int, total_mib: int = 24_576, reserved_mib: object = 317, free_mib: int = 24_000
    ) -> str:
        lines = [
            f"{index}, GPU-{index}a, Fake, {total_mib}, {reserved_mib}, {free_mib}\\n"
            for index in range(count)
        ]
        return "".join(lines)

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "ple_inference", *arguments]

    def environment(self, **extra: str) -> dict[str, str]:
        left_out = ("PLE_", "VLLM_", "CUDA_", "XDG_RUNTIME_DIR")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
        kept["PATH"] = f"{self.folder / 'bin'}:{kept['PATH']}"
        kept["PYTHONPATH"] = f"{kept.get('PYTHONPATH', '')}:{self.vllm}".lstrip(":")
        kept["XDG_RUNTIME_DIR"] = str(self.folder)
        return kept | {"FAKE_GPUS": self.gpus(3)} | extra

    def run(self, *arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments),
            capture_output=True,
            text=True,
            timeout=240,
            env=self.environment(**extra),
        )

    def refusal(self, *arguments: str, **extra: str) -> str:
        """Run it, see it fail, and return its one line."""
        done = self.run(*arguments, **extra)
        assert done.returncode == 1, done
        lines = [line for line in done.stderr.splitlines() if " INFO " not in line]
        assert len(lines) == 1, done.stderr
        assert lines[0].startswith("ple-inference: ")
        return lines[0]


@pytest.fixture
def machine(tmp_path: Path, planner_path: Path) -> Machine:
    """Three free GPUs of 24 GB, unless FAKE_GPUS says otherwise."""
    folder = tmp_path / "machine"
    (folder / "bin").mkdir(parents=True)
    for name, content in (("nvidia-smi", NVIDIA_SMI), ("vllm", VLLM.format(python=sys.executable))):
        path = folder / "bin" / name
        path.write_text(content)
        path.chmod(0o755)
    return Machine(folder, planner_path)


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Case:
    """A checkpoint to do something to."""
    return Case(tmp_path, monkeypatch, capsys)


@pytest.fixture(scope="session")
def write_tensors() -> Callable[..., None]:
    """Writes a checkpoint file that has a header and, as a hole, its tensors: name -> (dtype, shape)."""
    return released_layout.write_headers
