"""A gateway as a process of its own, whose memory can be told from the tests'."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from fake_engine import DEADLINE_S, Call, FakeEngine, chunk, message, wait_for

_MIB = 2**20
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("PLE_GATEWAY_")}


def oblige(call: Call) -> None:
    """An engine that answers whatever it is asked; cut by `length`, so that no schema is missed."""
    request = call.request
    if call.path == "/tokenize":
        call.answer(200, {"count": 1, "max_model_len": 32768, "tokens": [1]})
        return
    prompts = request["prompt"] if call.path == "/v1/completions" else "one"
    count = len(prompts) if isinstance(prompts, list) and not isinstance(prompts[0], int) else 1
    indices = range(request.get("n", 1) * count)
    if not request.get("stream"):
        whole = message("said", "length")
        call.answer(200, {**whole, "choices": [{**whole["choices"][0], "index": index} for index in indices]})
        return
    call.open_stream()
    for index in indices:
        part = chunk({"content": "said"}, "length")
        call.event({**part, "choices": [{**part["choices"][0], "index": index}]})
    call.event(b"[DONE]")
    call.end_stream()


class GatewayProcess:
    """`ple-gateway serve` in front of an engine that obliges; its owner stops it."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self._local = threading.local()
        self.engine = FakeEngine()
        self.engine.script = oblige
        self.log = folder / "gateway.log"
        defaults = {
            "http_address": "127.0.0.1:0",
            "engine_url": self.engine.url,
            "probe_interval_s": 0.2,
            "drain_timeout_s": 1,
        }
        variables = {f"PLE_GATEWAY_{k.upper()}": str(v) for k, v in {**defaults, **settings}.items()}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ple_gateway", "serve"], env={**CLEAN, **variables}, stderr=log
            )
        try:
            url = wait_for(
                lambda: re.search(r"listening url=http://127.0.0.1:(\d+)", self.log.read_text()),
                "the gateway listens",
            )
            self.port = int(url[1])
            wait_for(lambda: self.send("GET", "/readyz")[0] == 200, "the gateway is ready")
        except BaseException:
            self.stop()
            raise

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def send(
        self, method: str, path: str, body: bytes | None = None, timeout_s: float = 60
    ) -> tuple[int, bytes]:
        """Status and body of the answer; one connection serves many requests of a thread."""
        for fresh in (len(body or b"") > 2**20, True):
            connection = getattr(self._local, "connection", None)
            if fresh or connection is None:
                if connection is not None:
                    connection.close()
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
                self._local.connection = connection
            with suppress(BrokenPipeError, ConnectionResetError):
                # A refusal may come, and the connection be closed, while the body is still being sent.
                connection.request(method, path, body, {"content-type": "application/json"})
            try:
                response = connection.getresponse()
                return response.status, response.read()
            except (http.client.HTTPException, OSError):
                connection.close()
                del self._local.connection
                if fresh:
                    raise
        raise AssertionError("unreachable")

    def processes(self) -> list[psutil.Process]:
        main = psutil.Process(self.process.pid)
        return [main, *main.children(recursive=True)]

    def begin_measuring(self) -> None:
        """Forget what the processes have held so far."""
        for process in self.processes():
            Path(f"/proc/{process.pid}/clear_refs").write_text("5")

    def peak_mib(self) -> dict[str, int]:
        """The most memory that the gateway, and the largest of its workers, held since then."""
        main, *workers = [_peak_bytes(process.pid) // _MIB for process in self.processes()]
        return {"gateway": main, "worker": max(workers, default=0)}

    def stop(self) -> None:
        if connection := getattr(self._local, "connection", None):
            connection.close()
        self.process.send_signal(signal.SIGTERM)
        try:
            assert self.process.wait(DEADLINE_S) == 0
        finally:
            self.process.kill()
            self.process.wait()
            self.engine.close()


def _peak_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


def chat_body(**fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "hi"}], **fields}).encode()
