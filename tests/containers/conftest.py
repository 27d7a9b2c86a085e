"""deploy/compose.cpu.yaml, started for real by `make test-containers`, in a container engine of its own."""

import json
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from http_get import http_get
from waiting import wait_for

CHECKOUT = Path(__file__).resolve().parents[2]
KEY = "sk-container-tests"
PROJECT = "triplex-test"
# Only `make test-containers` sets it: whoever runs pytest has no container engine to spare.
collect_ignore_glob = [] if "TRIPLEX_CONTAINERS" in os.environ else ["test_*.py"]


class Deployment:
    """One compose project."""

    def __init__(self, folder: Path) -> None:
        keys = folder / "api_keys"
        keys.write_text(KEY)
        keys.chmod(0o644)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        self.url = f"http://{self.address}"
        self._environment = {
            **os.environ,
            "TRIPLEX_ADDRESS": self.address,
            "TRIPLEX_API_KEYS_FILE": str(keys),
        }

    def compose(self, *words: str, overrides: tuple[Path, ...] = (), deadline_s: float = 280) -> str:
        """Run one compose command to its end; its output."""
        files = (CHECKOUT / "deploy/compose.cpu.yaml", *overrides)
        command = ["docker", "compose", "-p", PROJECT, *(w for f in files for w in ("-f", str(f))), *words]
        done = subprocess.run(
            command, env=self._environment, capture_output=True, text=True, timeout=deadline_s
        )
        if done.returncode:
            pytest.fail(
                f"{' '.join(words)}: {done.stdout}{done.stderr}\n{self.logs() if 'up' in words else ''}"
            )
        return done.stdout

    def logs(self, *services: str) -> str:
        command = ["docker", "compose", "-p", PROJECT, "logs", "--no-color", "--tail", "60", *services]
        return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout

    def inspect(self, service: str, form: str) -> str:
        """One property of a service's container, in the template language of `docker inspect`."""
        container = self.compose("ps", "-aq", service).strip()
        return subprocess.check_output(["docker", "inspect", "-f", form, container], text=True).strip()

    def inside(self, service: str, *command: str) -> str:
        """What a command prints in a service's container."""
        return self.compose("exec", "-T", service, *command)

    def readyz(self, service: str) -> dict:
        """Health as a service's own container sees it; empty while there is none."""
        port = {"daemon": "8200", "inference": "8100", "gateway": "8000"}[service]
        container = self.compose("ps", "-q", service).strip()
        done = subprocess.run(
            ["docker", "exec", container, "python3", "/opt/ready.py", port], capture_output=True, text=True
        )
        try:
            return json.loads(done.stdout) | {"serves": done.returncode == 0}
        except json.JSONDecodeError:
            return {}

    def wait_healthy(self, service: str, deadline_s: float = 120) -> None:
        """Until the engine's own health check of a service says so."""
        wait_for(
            lambda: self.inspect(service, "{{.State.Health.Status}}") == "healthy",
            f"healthy {service}", deadline_s,
        )  # fmt: skip

    def get(self, path: str) -> tuple[int, str]:
        """Status and body of a plain GET from outside the containers."""
        return http_get(self.url + path, KEY)


@pytest.fixture(scope="session")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    one = Deployment(tmp_path_factory.mktemp("deployment"))
    try:
        one.compose("up", "-d", "--wait", "--no-build")
        yield one
    finally:
        one.compose("down", "--volumes", "--timeout", "5", "--remove-orphans")


@pytest.fixture(scope="session")
def client(deployment: Deployment) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{deployment.url}/v1", api_key=KEY, max_retries=0, timeout=200) as one:
        yield one
