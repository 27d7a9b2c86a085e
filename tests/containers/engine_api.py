"""The container engine's own API, on its Unix socket: quicker by far than the docker command."""

import http.client
import json
import os
import socket
from typing import Any


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=30)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def inspect(container: str) -> dict[str, Any]:
    """What `docker inspect` shows of a container; empty while there is none of that name."""
    connection = _UnixConnection(os.environ["DOCKER_HOST"].removeprefix("unix://"))
    try:
        connection.request("GET", f"/containers/{container}/json")
        response = connection.getresponse()
        body = json.loads(response.read())
        return body if response.status == 200 else {}
    finally:
        connection.close()
