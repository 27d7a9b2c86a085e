"""One compose project of deploy/compose.cpu.yaml, as its operator sees it."""

import http.client
import json
import os
import signal
import socket
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any

import engine_api
import openai
import pytest
from http_get import http_get
from waiting import wait_for

CHECKOUT = Path(__file__).resolve().parents[2]
FILE = CHECKOUT / "deploy/compose.cpu.yaml"
KEY, OTHER_KEY = "sk-container-tests", "sk-of-somebody-else"
PROJECT = "triplex-test"
PORTS = {"daemon": 8200, "inference": 8100, "gateway": 8000}
# What the gateway says of a service that does not serve.
AWAY = {"unknown", "down", "loading", "warming", "starting", "stopping", "stalled"}


class Deployment:
    """The three services, and what an operator does to them."""

    def __init__(self, folder: Path) -> None:
        keys = folder / "api_keys"
        keys.write_text(f"{KEY}\n{OTHER_KEY}\n")
        keys.chmod(0o644)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        self.url = f"http://{self.address}"
        # By service as it says itself, and by dependency as the gateway says.
        self.said_at_start: defaultdict[str, set[str]] = defaultdict(set)
        self._environment = os.environ | {
            "TRIPLEX_ADDRESS": self.address,
            "TRIPLEX_API_KEYS_FILE": str(keys),
        }

    def compose(
        self,
        *words: str,
        overrides: tuple[Path, ...] = (),
        values: dict[str, str] | None = None,
        deadline_s: float = 280,
    ) -> str:
        """Run one compose command to its end; its output. `values` are those of the compose file."""
        command = ["docker", "compose", "-p", PROJECT]
        command += [word for file in (FILE, *overrides) for word in ("-f", str(file))]
        environment = self._environment | (values or {})
        done = subprocess.run(
            [*command, *words], env=environment, capture_output=True, text=True, timeout=deadline_s
        )
        if done.returncode:
            pytest.fail(f"{' '.join(words)}: {done.stdout}{done.stderr}\n{self.logs()}")
        return done.stdout

    def start(self) -> None:
        """A cold start: models are made and kernels compiled. What was said of health meanwhile is kept."""
        self.compose("up", "-d", "--no-build")
        wait_for(self._serves_at_last, "three services that serve", 280, 0.2)

    def _serves_at_last(self) -> bool:
        for service in PORTS:
            self.said_at_start[service].add(self.readyz(service).get("state", ""))
        for service, state in self.health_outside().get("dependencies", {}).items():
            self.said_at_start[service].add(state)
        return self.all_serve

    def begin(self, *words: str) -> subprocess.Popen[bytes]:
        """Start a compose command, to be waited for."""
        command = ["docker", "compose", "-p", PROJECT, "-f", str(FILE), *words]
        return subprocess.Popen(command, env=self._environment, stderr=subprocess.DEVNULL)

    def logs(self, *services: str) -> str:
        command = ["docker", "compose", "-p", PROJECT, "logs", "--no-color", "--tail", "60", *services]
        return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout

    def inside(self, service: str, *command: str) -> str:
        """What a command prints in a service's container."""
        return subprocess.check_output(
            ["docker", "exec", container_name(service), *command], text=True, timeout=60
        )

    def inspect(self, service: str) -> dict[str, Any]:
        """All that the engine knows of a service's container."""
        return engine_api.inspect(container_name(service))

    def pid(self, service: str) -> int:
        """The service itself, seen from the host; PID 1 of the container is an init above it."""
        init = self.inspect(service)["State"]["Pid"]
        children = Path(f"/proc/{init}/task/{init}/children").read_text().split()
        return int(children[0]) if children else init

    def starts(self, *services: str) -> list[tuple[str, int]]:
        """When containers were started, and how often the engine has restarted them."""
        found = [self.inspect(service) for service in services]
        return [(one["State"]["StartedAt"], one["RestartCount"]) for one in found]

    def kill(self, *services: str) -> None:
        """Let services crash, all at once: unlike after `compose kill`, their restart policy acts."""
        for pid in [self.pid(service) for service in services]:
            os.kill(pid, signal.SIGKILL)

    def readyz(self, service: str) -> dict[str, Any]:
        """Health at the container's own address, which only this host reaches; empty without an answer."""
        networks = self.inspect(service).get("NetworkSettings", {}).get("Networks", {})
        addresses = [network["IPAddress"] for network in networks.values() if network["IPAddress"]]
        if not addresses:
            return {}
        connection = http.client.HTTPConnection(addresses[0], PORTS[service], timeout=5)
        try:
            connection.request("GET", "/readyz")
            response = connection.getresponse()
            return json.loads(response.read()) | {"serves": response.status == 200}
        except (OSError, http.client.HTTPException, ValueError):
            return {}
        finally:
            connection.close()

    def health_inside(self, service: str) -> dict[str, Any]:
        """Health as the service's own health check sees it."""
        command = ["docker", "exec", container_name(service)]
        command += ["python3", "/opt/ready.py", str(PORTS[service])]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        return json.loads(done.stdout) | {"serves": done.returncode == 0}

    def get(self, path: str) -> tuple[int, str]:
        """Status and body of a plain GET from outside of the containers."""
        return http_get(self.url + path, KEY)

    def health_outside(self) -> dict[str, Any]:
        """What the gateway tells the world of all three; empty while it does not answer."""
        try:
            status, body = self.get("/readyz")
            return json.loads(body) | {"serves": status == 200}
        except (OSError, http.client.HTTPException):
            return {}

    @property
    def all_serve(self) -> bool:
        """Whether each service serves by its own word, and by the gateway's."""
        health = self.health_outside()
        if not health.get("serves") or any(word in AWAY for word in health["dependencies"].values()):
            return False
        return all(self.readyz(service).get("serves") for service in ("daemon", "inference"))

    def wait_serving(self, deadline_s: float = 200) -> None:
        wait_for(lambda: self.all_serve, "three services that serve", deadline_s, 0.2)

    def client(self, key: str = KEY) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=200)


def container_name(service: str) -> str:
    return f"{PROJECT}-{service}-1"
