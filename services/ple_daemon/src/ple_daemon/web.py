"""HTTP for people and orchestrators: /livez, /readyz, /metrics."""

import socket
import threading
from collections.abc import Callable
from typing import Any

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ple_daemon.errors import EndpointError
from ple_daemon.health import Health

_STOP_TIMEOUT_S = 5.0


def create_app(
    health: Health, registry: CollectorRegistry, details: Callable[[], dict[str, Any]]
) -> Starlette:
    """The application; `details` adds to the body of /readyz what is known of the table."""

    def livez(_: Request) -> Response:
        return JSONResponse(health.as_json(), status_code=200 if health.is_alive else 503)

    def readyz(_: Request) -> Response:
        return JSONResponse(health.as_json() | details(), status_code=200 if health.is_serving else 503)

    def metrics(_: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return Starlette(routes=[Route("/livez", livez), Route("/readyz", readyz), Route("/metrics", metrics)])


class WebServer:
    """Serves an application from a thread of its own, on an address that is bound at construction."""

    def __init__(self, address: str) -> None:
        """Raises EndpointError when host:port cannot be bound."""
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, int(port)))
        except (OSError, OverflowError) as error:
            self._socket.close()
            reason = getattr(error, "strerror", None) or str(error)
            raise EndpointError(f"HTTP address {address}: {reason}; choose another --http-address") from error
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    def start(self, app: Starlette) -> None:
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=1,
            log_config=None,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, name="http", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._thread.join(_STOP_TIMEOUT_S)
        self._socket.close()
