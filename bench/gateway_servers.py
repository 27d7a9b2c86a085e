"""The processes that bench/gateway_bench.py measures: the gateway, LiteLLM's proxy, the engine of both."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from gateway_engine import AT_ONCE, PACED

_START_TIMEOUT_S = 120  # LiteLLM imports for half a minute where cores are busy
_STOP_TIMEOUT_S = 15
_HOST = "127.0.0.1"


@dataclass(frozen=True)
class Server:
    """Something that speaks chat completions."""

    port: int
    process: psutil.Process
    host: str = _HOST

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def cpu_s(self) -> float:
        """Processor seconds so far, children included."""
        times = [process.cpu_times() for process in [self.process, *self.process.children(recursive=True)]]
        return float(sum(spent.user + spent.system for spent in times))

    def rss_mib(self) -> float:
        """Memory of the process itself."""
        return float(self.process.memory_info().rss / 2**20)


@contextmanager
def engine(folder: Path) -> Iterator[Server]:
    """Run the engine that costs nothing."""
    script = str(Path(__file__).with_name("gateway_engine.py"))
    with _running("engine", lambda port: [sys.executable, script, str(port)], "/health", folder) as server:
        yield server


@contextmanager
def gateway(folder: Path, engine_url: str) -> Iterator[Server]:
    """Run our gateway with its defaults."""

    def command(port: int) -> list[str]:
        own = ["-m", "ple_gateway", "serve", "--http-address", f"{_HOST}:{port}", "--engine-url", engine_url]
        return [sys.executable, *own]

    with _running("gateway", command, "/readyz", folder) as server:
        yield server


@contextmanager
def litellm(folder: Path, executable: str, engine_url: str) -> Iterator[Server]:
    """Run LiteLLM's proxy as its documents advise for production: one process, no keys, no database."""
    models = [
        {
            "model_name": name,
            "litellm_params": {"model": f"openai/{name}", "api_base": f"{engine_url}/v1", "api_key": "none"},
        }
        for name in (AT_ONCE, PACED)
    ]
    # Neither side has keys; LiteLLM starts without only when told so.
    general = {"dangerously_permit_weak_or_unset_master_key": True}
    config = folder / "litellm.json"  # JSON is YAML
    config.write_text(json.dumps({"model_list": models, "general_settings": general}))

    def command(port: int) -> list[str]:
        own = ["--config", str(config), "--host", _HOST, "--port", str(port), "--num_workers", "1"]
        return [executable, *own]

    with _running("litellm", command, "/health/liveliness", folder) as server:
        yield server


@contextmanager
def _running(
    name: str, command: Callable[[int], list[str]], health_path: str, folder: Path
) -> Iterator[Server]:
    """Run a process until the block ends; it serves when `health_path` answers 200. Logs go to a file."""
    with socket.create_server((_HOST, 0)) as free:
        port = free.getsockname()[1]
    log = folder / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command(port), stdout=output, stderr=output, env=_environment())
    try:
        end_s = time.monotonic() + _START_TIMEOUT_S
        while not _answers(port, health_path):
            if process.poll() is not None or time.monotonic() > end_s:
                raise SystemExit(f"gateway_bench: {name} did not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.1)
        yield Server(port, psutil.Process(process.pid))
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answers(port: int, path: str) -> bool:
    connection = http.client.HTTPConnection(_HOST, port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def _environment() -> dict[str, str]:
    """Without the settings of a running installation; LiteLLM fetches nothing."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("PLE_GATEWAY_", "LITELLM"))
    }
    own = {"PLE_GATEWAY_DRAIN_TIMEOUT_S": "0"}
    lite = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MODE": "PRODUCTION", "LITELLM_LOG": "ERROR"}
    return {**kept, **own, **lite}
