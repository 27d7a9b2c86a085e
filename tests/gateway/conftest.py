"""A real gateway on a real socket in front of a scripted engine."""

import asyncio
import http.client
import json
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ple_gateway.server import Server, bind
from ple_gateway.settings import Settings

sys.path.insert(0, str(Path(__file__).parent))  # for fake_engine: import mode "importlib" adds no folder

from fake_engine import DEADLINE_S, FakeEngine, wait_for


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error object, checked for OpenAI's shape."""
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str)
        assert error["message"]
        assert error["code"] is None or isinstance(error["code"], str)
        return error

    @property
    def events(self) -> list[Any]:
        """Data of the events: objects, and "[DONE]" as it is."""
        blocks = [block for block in self.body.split(b"\n\n") if block and not block.startswith(b":")]
        assert all(block.startswith(b"data: ") for block in blocks)
        data = [block.removeprefix(b"data: ") for block in blocks]
        return ["[DONE]" if item == b"[DONE]" else json.loads(item) for item in data]

    @property
    def text(self) -> str:
        choices = [
            choice for event in self.events if event != "[DONE]" for choice in event.get("choices", [])
        ]
        return "".join(choice["delta"].get("content") or "" for choice in choices)


class RunningGateway:
    """A gateway in a thread of this process."""

    def __init__(self, settings: Settings) -> None:
        listener = bind(settings.http_address)
        self.port: int = listener.getsockname()[1]
        self.server = Server(settings)
        self.gateway = self.server.gateway
        self._listener = listener
        self._baseline: dict[Any, float] = {}
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        wait_for(lambda: self.server.started, "the gateway serves")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=self.server.config.get_loop_factory()) as runner:
            self.loop = runner.get_loop()
            runner.run(self.server.serve(sockets=[self._listener]))

    def stop(self) -> None:
        self.server.should_exit = True
        self._thread.join(DEADLINE_S)
        self._listener.close()
        assert not self._thread.is_alive(), "the gateway does not stop"

    def metric(self, name: str, **labels: str) -> float:
        """A metric's value, the sum over labels not named; of counters, since `begin_counting`."""
        wanted = labels.items()
        return sum(
            value - self._baseline.get(key, 0.0)
            for key, value in self._samples().items()
            if key[0] == f"ple_gateway_{name}" and wanted <= dict(key[1]).items()
        )

    def faults(self) -> dict[Any, float]:
        """Requests that failed by a fault of the gateway itself, since `begin_counting`."""
        faults = {
            key: value - self._baseline.get(key, 0.0)
            for key, value in self._samples().items()
            if key[0] == "ple_gateway_requests_total" and ("outcome", "fault") in key[1]
        }
        return {key: value for key, value in faults.items() if value}

    def begin_counting(self) -> None:
        self._baseline = {key: value for key, value in self._samples().items() if key[0].endswith("_total")}

    def _samples(self) -> dict[Any, float]:
        families = self.gateway.metrics.registry.collect()
        return {_sample_key(s.name, s.labels): s.value for family in families for s in family.samples}

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
        timeout_s: float = DEADLINE_S,
    ) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            data = body if isinstance(body, bytes | type(None)) else json.dumps(body).encode()
            kind = {} if data is None else {"content-type": "application/json"}
            connection.request(method, path, data, {**kind, **(headers or {})})
            response = connection.getresponse()
            names = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, names, response.read())
        finally:
            connection.close()

    def chat(self, **fields: Any) -> Answer:
        request = {"model": "triplex-tiny", "messages": [{"role": "user", "content": "hi"}], **fields}
        return self.request("POST", "/v1/chat/completions", request)

    def open_chat(self, **fields: Any) -> socket.socket:
        """Send a chat request on a raw socket and leave the rest to the test."""
        request = {"model": "triplex-tiny", "messages": [{"role": "user", "content": "hi"}], **fields}
        body = json.dumps(request).encode()
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=DEADLINE_S)
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        sock.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        return sock

    def wait_ready(self) -> None:
        wait_for(lambda: self.request("GET", "/readyz").json["state"] == "ready", "the gateway is ready")


def _sample_key(name: str, labels: dict[str, str]) -> Any:
    return name, frozenset(labels.items())


@pytest.fixture(scope="session")
def shared_engine() -> Iterator[FakeEngine]:
    engine = FakeEngine()
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def shared_gateway(shared_engine: FakeEngine) -> Iterator[RunningGateway]:
    gateway = RunningGateway(settings_for(shared_engine))
    yield gateway
    gateway.stop()


@pytest.fixture
def engine(shared_engine: FakeEngine) -> Iterator[FakeEngine]:
    """The engine behind every gateway of a test; as new."""
    shared_engine.renew()
    yield shared_engine
    assert not shared_engine.faults


def settings_for(engine: FakeEngine, **settings: Any) -> Settings:
    defaults = {
        "http_address": "127.0.0.1:0",
        "engine_url": engine.url,
        "probe_interval_s": 0.1,
        "drain_timeout_s": 0.2,
        "image_workers": 1,
        "warm_probe": False,  # it would be a call like others to the engine's scripts
        "hold_timeout_s": 2,
        "total_timeout_s": 12,  # no test may hang because the engine's script does
    }
    return Settings(**{**defaults, **settings})


def check_idle(gateway: RunningGateway) -> None:
    """After every test nothing may be occupied any more, and nothing may have gone wrong inside."""
    wait_for(lambda: gateway.gateway.gate.idle, "all places of the gate are free")
    assert gateway.metric("requests_in_flight") == 0
    assert gateway.metric("requests_queued") == 0
    assert gateway.gateway.bodies.held_bytes == 0
    assert gateway.faults() == {}


StartGateway = Callable[..., RunningGateway]


@pytest.fixture
def start_gateway(engine: FakeEngine) -> Iterator[StartGateway]:
    """Start gateways with settings of their own."""
    running: list[RunningGateway] = []

    def start(*, engine: FakeEngine = engine, **settings: Any) -> RunningGateway:
        running.append(RunningGateway(settings_for(engine, **settings)))
        return running[-1]

    yield start
    try:
        for gateway in running:
            check_idle(gateway)
    finally:
        for gateway in running:
            gateway.stop()


@pytest.fixture
def gateway(shared_gateway: RunningGateway, engine: FakeEngine) -> Iterator[RunningGateway]:
    """A ready gateway with default settings; its counters begin at 0."""
    shared_gateway.wait_ready()
    shared_gateway.begin_counting()
    yield shared_gateway
    check_idle(shared_gateway)
