"""Starts daemon and engine for one scenario, in a process of its own: GPU memory is free when it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import findings
import one_card

from ple_rpc.client import TableClient

READY_S = 120.0
SHUTDOWN_S = 12.0
PY_SPY = "py-spy"


class Daemon:
    """The PLE daemon as a child process that can be killed, stopped and started again."""

    def __init__(self, table: Path) -> None:
        self._table = table
        self._folder = tempfile.TemporaryDirectory(prefix="ple-gpu-")
        self.address = f"unix:{self._folder.name}/table.sock"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Daemon:
        command = [
            sys.executable,
            "-m",
            "ple_daemon",
            "serve",
            str(self._table),
            "--run-dir",
            self._folder.name,
        ]
        command += [
            "--http-address",
            "127.0.0.1:0",
            "--log-level",
            "warning",
            "--cache-dir",
            "/tmp/ple-kernels",
        ]
        self.process = subprocess.Popen(command)
        return self

    def wait(self) -> Daemon:
        with TableClient(self.address) as client:
            client.wait_ready(READY_S)
        return self

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)
        if number == signal.SIGKILL:
            self.process.wait()

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._folder.cleanup()


@contextmanager
def daemon(table: Path) -> Iterator[Daemon]:
    served = Daemon(table).start().wait()
    try:
        yield served
    finally:
        served.close()


@contextmanager
def running_engine(model: Path, address: str, pp: int, **arguments: Any) -> Iterator[Any]:
    """vLLM's LLM with the plugin, as the launcher would configure it; its processes end with the body."""
    from vllm import LLM

    options: dict[str, Any] = {
        "model": str(model),
        "skip_tokenizer_init": True,
        "max_model_len": 16_384,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 2_048,
        "pipeline_parallel_size": pp,
        "gpu_memory_utilization": 0.85,
        "enable_prefix_caching": True,
        "seed": 0,
        "disable_log_stats": True,
        "worker_cls": "ple_inference.vllm_plugin.worker.TriplexWorker",
        "worker_extension_cls": "recorder.Recorder",
        "additional_config": {"triplex": {"table": address}},
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [1, 2, 4, 8],
        },
    }
    shared = one_card.ARGUMENTS if one_card.is_shared() and pp > 1 else {}
    llm = LLM(**(options | shared | arguments))
    try:
        yield llm
    finally:
        # A script that ends without this waits for its engine, which waits for requests.
        llm.llm_engine.engine_core.shutdown()


def run_scenario(
    name: str,
    settings: dict[str, Any],
    out: Path,
    deadline_s: float,
    gpus: str,
    environment: Mapping[str, str],
) -> dict[str, Any]:
    """Run a module's `run(settings)` in a process with these GPUs; the findings say error when it failed.

    Then they are what it kept until it failed.
    """
    result, log, partial = (out / f"{name}.{suffix}" for suffix in ("json", "log", "partial.json"))
    for left in (result, partial):
        left.unlink(missing_ok=True)
    settings = settings | {findings.WHERE: str(partial)}
    variables = os.environ | {
        "CUDA_VISIBLE_DEVICES": gpus,
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # Marlin comes as PTX for this card; the driver keeps what it makes of it for the next process.
        "CUDA_CACHE_MAXSIZE": str(4 << 30),
        "PYTHONPATH": f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}",
        **environment,
    }
    scenario = settings.get("scenario", name)
    start_s = time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", _CODE, scenario, json.dumps(settings), str(result)],
            env=variables, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        ended = _wait(process, result, deadline_s)
        if not ended:
            _dump_stacks(process.pid, file)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    taken_s = time.monotonic() - start_s
    if not result.exists():
        tail = log.read_text(errors="replace").splitlines()[-25:]
        error = f"exit code {process.returncode} after {taken_s:.0f} s"
        return findings.kept(partial) | {"error": error, "tail": tail, "taken_s": taken_s}
    return json.loads(result.read_text()) | {"taken_s": taken_s, "ended_by_itself": ended}


_CODE = """
import json, pathlib, sys
from importlib import import_module
found = import_module(sys.argv[1]).run(json.loads(sys.argv[2]))
result = pathlib.Path(sys.argv[3])
result.with_suffix(".part").write_text(json.dumps(found))
result.with_suffix(".part").rename(result)
"""


def _wait(process: subprocess.Popen[bytes], result: Path, deadline_s: float) -> bool:
    """Whether the process ended in time; once its findings are there it has half a minute more."""
    deadline = time.monotonic() + deadline_s
    while time.monotonic() < deadline:
        try:
            process.wait(1)
        except subprocess.TimeoutExpired:
            if result.exists():
                deadline = min(deadline, time.monotonic() + SHUTDOWN_S)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(SHUTDOWN_S)
        else:
            return True
    return False


def _dump_stacks(group: int, log: IO[bytes]) -> None:
    """Where each process of the group hangs, if py-spy is at hand."""
    listed = subprocess.run(
        ["ps", "-o", "pid=", "-g", str(group)], capture_output=True, text=True, check=False
    )
    for pid in listed.stdout.split():
        for task in sorted(Path(f"/proc/{pid}/task").glob("*")):
            with suppress(OSError):
                words = [(task / name).read_text().strip() for name in ("comm", "wchan", "syscall")]
                log.write(f"{pid} {task.name} {words}\n".encode())
        log.flush()
        with suppress(FileNotFoundError, subprocess.TimeoutExpired):
            subprocess.run([PY_SPY, "dump", "--pid", pid], stdout=log, stderr=log, timeout=30, check=False)
