"""Runs the reference engine's HTTP server: up at once, ready when the model and the table are."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from ple_inference.checkpoint import Checkpoint
from ple_inference.health import Health
from ple_inference.metrics import Metrics
from ple_inference.operations import starting_app
from ple_inference.settings import Settings, split_address

if TYPE_CHECKING:
    from ple_inference.reference.service import Service
from ple_rpc.client import ClientOptions, TableClient
from ple_rpc.errors import TableError
from ple_rpc.rundir import check_socket_path

_log = logging.getLogger(__name__)
_UNIX = "unix:"
_DRAIN_POLL_S = 0.1
_CLOSE_CONNECTIONS_S = 5
_MAX_REASON_CHARS = 500


class ServeError(Exception):
    """Why serving ended badly; one line."""


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:_MAX_REASON_CHARS]}"


def serve(settings: Settings, checkpoint: Checkpoint) -> None:
    """Serve until SIGTERM or SIGINT. Raises ServeError."""
    try:
        if settings.table_address.startswith(_UNIX):
            check_socket_path(Path(settings.table_address.removeprefix(_UNIX)))
        options = ClientOptions(lookup_deadline_s=settings.lookup_deadline_s)
        client = TableClient(settings.table_address, options)
    except (TableError, ValueError) as error:
        raise ServeError(str(error)) from error
    with contextlib.closing(client), contextlib.closing(_bind(settings.http_address)) as listener:
        asyncio.run(_Server(settings, checkpoint, client, listener).run())


def _bind(address: str) -> socket.socket:
    host, port = split_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ServeError(
            f"cannot listen on {address}: {error.strerror or error}; choose another --http-address"
        ) from error
    return listener


class _QuietServer(uvicorn.Server):
    """uvicorn without its own signal handlers: draining comes before it stops."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Switch:
    """An application that can be replaced while it is served."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)


class _Server:
    def __init__(
        self, settings: Settings, checkpoint: Checkpoint, client: TableClient, listener: socket.socket
    ) -> None:
        self._settings, self._checkpoint, self._client = settings, checkpoint, client
        self._listener = listener
        self._metrics, self._health = Metrics(), Health()
        self._metrics.watch_table(lambda: client.stats)
        self._health.add_check(lambda: "waiting_for_table" if client.stats.waiting_since else None)
        self._service: Service | None = None
        self._app = _Switch(starting_app(self._health, self._metrics))
        config = uvicorn.Config(
            self._app,
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="off",
            timeout_graceful_shutdown=_CLOSE_CONNECTIONS_S,
        )
        self._http = _QuietServer(config)

    async def run(self) -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        host, port = self._listener.getsockname()[:2]
        _log.info("listening address=%s:%d", host, port)
        http = asyncio.create_task(self._http.serve(sockets=[self._listener]))
        stopped = asyncio.create_task(stop.wait())
        loading = asyncio.create_task(asyncio.to_thread(self._load))
        try:
            await asyncio.wait({http, stopped, loading}, return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                self._start_serving(loading.result())
                await asyncio.wait({http, stopped}, return_when=asyncio.FIRST_COMPLETED)
            await self._drain()
        finally:
            stopped.cancel()
            await self._shut_down(http, loading)

    def _load(self) -> Service:
        # Imported here, while health is already served: torch and transformers take seconds.
        from ple_inference.reference.service import load_service
        from ple_inference.table_check import WrongTableError

        try:
            return load_service(self._settings, self._checkpoint, self._metrics, self._client)
        except (WrongTableError, TableError) as error:
            raise ServeError(str(error)) from error
        except Exception as error:
            # Transformers and its like raise whatever they please for a bad checkpoint.
            _log.debug("load failed", exc_info=error)
            raise ServeError(f"cannot load {self._checkpoint.path}: {_one_line(error)}") from error

    def _start_serving(self, service: Service) -> None:
        from ple_inference.reference.api.app import Api, create_app

        self._service = service
        self._app.app = create_app(Api(service, self._health, self._metrics))
        self._health.ready()
        _log.info("ready model=%s max_model_len=%d", self._settings.model_name, service.max_model_len)

    async def _drain(self) -> None:
        self._health.stopping()
        if self._service is None:
            return
        engine = self._service.engine
        _log.info("draining running=%d waiting=%d", engine.num_running, engine.num_waiting)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.drain_deadline_s):
                while engine.num_running or engine.num_waiting:
                    await asyncio.sleep(_DRAIN_POLL_S)

    async def _shut_down(self, http: asyncio.Task[None], loading: asyncio.Task[Service]) -> None:
        # Ends a load that waits for the daemon, and lookups that do.
        self._client.close()
        if self._service is not None:
            await asyncio.to_thread(self._service.close)
        elif not loading.done():
            await asyncio.wait({loading})
            # Closing the client has failed a load that waited for the daemon: nobody asks for its error.
            loading.exception()
        self._http.should_exit = True
        await http
        _log.info("stopped")
