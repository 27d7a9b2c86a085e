"""Health, capacity and overrides as a running vLLM's API server answers them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import httpx2 as httpx
import pytest
import released_layout
import uvicorn
from fastapi import FastAPI
from waiting import wait_for

from ple_inference.vllm_engine.middleware import TriplexMiddleware
from ple_inference.vllm_engine.progress import Progress
from ple_inference.vllm_plugin.overrides import ALL
from ple_inference.vllm_plugin.table_wait import TableWait

DEADLINE_S = 20.0


class Engine:
    """What the middleware reads of AsyncLLM, and of `app.state` beside it."""

    def __init__(self, wait_file: Path) -> None:
        self.errored = False
        self.requests = 0
        self.output_processor = SimpleNamespace(get_num_unfinished_requests=lambda: self.requests)
        self.wait_file = wait_file

    @property
    def dead(self) -> bool:
        return self.errored

    @property
    def unfinished(self) -> int:
        return self.requests


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return Engine(tmp_path / "wait")


@pytest.fixture
def wait(engine: Engine) -> Iterator[TableWait]:
    """The worker's end of the file."""
    made = TableWait(engine.wait_file, create=True)
    yield made
    made.close()


@contextmanager
def served(engine: Engine, stall_s: float) -> Iterator[httpx.Client]:
    app = FastAPI()
    app.state.engine_client = engine
    app.state.args = SimpleNamespace(served_model_name=None, model="/models/x")
    app.state.vllm_config = SimpleNamespace(
        additional_config={"triplex": {"table": "unix:/x", "wait_file": str(engine.wait_file)}}
    )

    @app.get("/health")
    async def stock() -> None:
        """vLLM's own, which ours comes before."""

    app.add_middleware(TriplexMiddleware, stall_s=stall_s)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="on"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            wait_for(lambda: server.started or not thread.is_alive(), "uvicorn")
            with httpx.Client(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=10) as client:
                yield client
        finally:
            server.should_exit = True
            thread.join(DEADLINE_S)
            assert not thread.is_alive()


# -- over HTTP -----------------------------------------------------------------------------------------


def test_health_of_an_engine_that_works(engine, wait) -> None:
    with served(engine, stall_s=60) as client:
        for path in ("/health", "/readyz", "/livez"):
            answer = client.get(path)
            assert answer.status_code == 200
            assert set(answer.json()) == {"state", "reasons", "since"}
            assert answer.json()["state"] == "ready"


def test_health_of_a_dead_engine(engine, wait) -> None:
    with served(engine, stall_s=60) as client:
        engine.errored = True
        answer = client.get("/health")
        assert answer.status_code == 503
        assert answer.json()["reasons"] == ["engine_dead"]


def test_health_of_a_stalled_engine_and_of_one_that_waits(engine, wait) -> None:
    with served(engine, stall_s=1.5) as client:
        engine.requests = 2
        wait_for(lambda: client.get("/health").status_code == 503, "stalled")
        (reason,) = client.get("/health").json()["reasons"]
        assert reason.startswith("engine_stalled: 2 requests and no step for ")
        wait.write(time.monotonic(), 5)
        answer = client.get("/health")
        assert answer.status_code == 200
        assert answer.json()["state"] == "degraded"
        assert answer.json()["reasons"] == ["waiting_for_table"]
        wait.write(None, 6)
        wait_for(lambda: client.get("/health").json()["reasons"] == [], "the table is back")


# -- the verdict ---------------------------------------------------------------------------------------


@pytest.fixture
def progress(engine, wait) -> Iterator[tuple[Progress, Callable[[float], None]]]:
    """With 90 s to a stall, and a function that lets seconds pass as the server would."""
    now = [1000.0]
    made = Progress(engine, engine.wait_file, stall_s=90, clock=lambda: now[0])

    def passing(seconds: float) -> None:
        for _ in range(int(seconds)):
            now[0] += 1
            made.look()

    yield made, passing
    made.close()


def test_idle_is_no_stall(progress, engine) -> None:
    verdict, passing = progress
    passing(600)
    engine.requests = 1
    passing(89)
    assert verdict.trouble is None
    passing(2)
    assert verdict.trouble == "engine_stalled: 1 requests and no step for 91 s"


def test_steps_are_progress_and_tokens_are_not_asked_for(progress, engine, wait) -> None:
    verdict, passing = progress
    engine.requests = 1
    for lookups in range(1, 20):
        wait.write(None, lookups)
        passing(80)
        assert verdict.trouble is None


def test_waiting_for_the_table_starts_the_clock_anew(progress, engine, wait) -> None:
    verdict, passing = progress
    engine.requests = 1
    passing(60)
    wait.write(990.0, 0)
    passing(300)
    assert verdict.trouble is None
    assert verdict.waiting_for_table
    wait.write(None, 0)
    passing(60)
    assert verdict.trouble is None
    passing(60)
    assert verdict.trouble is not None


def test_without_the_file_only_death_is_told(engine) -> None:
    now = [0.0]
    verdict = Progress(engine, None, clock=lambda: now[0])
    engine.requests = 1
    for _ in range(1000):
        now[0] += 1
        verdict.look()
    assert verdict.trouble is None
    engine.errored = True
    assert verdict.trouble == "engine_dead"


# -- in vLLM -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def vllm_server(planner_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """vLLM's application and middlewares; it has the key `secret`."""
    folder = tmp_path_factory.mktemp("vllm")
    argument = {"wait_file": str(folder / "wait"), "text": released_layout.TEXT}
    path = f"{os.environ.get('PYTHONPATH', '')}:{planner_path}".lstrip(":")
    with (folder / "log").open("w+") as log:
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "vllm_server.py"), json.dumps(argument)],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=os.environ | {"PYTHONPATH": path},
        )
        try:
            assert process.stdout is not None
            port = process.stdout.readline().strip()
            log.seek(0)
            assert port, log.read()
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
                yield client
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.communicate(timeout=20)
            finally:
                process.kill()


def test_vllm_takes_the_middleware(vllm_server) -> None:
    answer = vllm_server.get("/health")
    assert answer.status_code == 200
    assert answer.json()["state"] == "ready"


def test_vllm_asks_for_its_key_before_ours_answer(vllm_server) -> None:
    assert vllm_server.get("/v1/triplex/capacity").status_code == 401
    headers = {"authorization": "Bearer secret"}
    capacity = vllm_server.get("/v1/triplex/capacity", headers=headers).json()
    assert (capacity["engine"], capacity["model"]) == ("vllm", "flash-next")
    assert (capacity["num_blocks"], capacity["tokens_per_block"]) == (299, 1568)
    assert capacity["fixed_blocks_per_request"] == 9
    overrides = vllm_server.get("/v1/triplex/overrides", headers=headers).json()
    assert [override["name"] for override in overrides] == [override.name for override in ALL]
    assert all(symbol["matches"] for override in overrides for symbol in override["upstream"])


def test_streams_pass_through(vllm_server) -> None:
    answer = vllm_server.get("/v1/stream", headers={"authorization": "Bearer secret"})
    assert answer.text == "data: 0\n\ndata: 1\n\ndata: 2\n\n"
    assert answer.headers["x-request-id"]
