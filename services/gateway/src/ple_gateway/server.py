"""One uvicorn server on a socket that is bound before anything else starts."""

import asyncio
import logging
import signal
import socket
from types import FrameType

import uvicorn
from fastapi import FastAPI

from ple_gateway.app import Gateway, create_app
from ple_gateway.connection import connection_class
from ple_gateway.settings import Settings, split_address

_LOG = logging.getLogger(__name__)
_IDLE_S = 75
_BACKLOG = 2048
_GRACE_S = 5  # for the error frames of requests that outlived the drain


def bind(address: str) -> socket.socket:
    """Bind "host:port"; raises OSError when the port is taken or the host is not this machine's."""
    host, port = split_address(address)
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(target)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


class Server(uvicorn.Server):
    """A server that drains on SIGTERM, SIGINT and SIGHUP, and exits with 0 after it."""

    def __init__(self, settings: Settings) -> None:
        app: FastAPI = create_app(settings)
        self.gateway: Gateway = app.state.gateway
        self._drain: asyncio.Task[None] | None = None
        config = uvicorn.Config(
            app,
            http=connection_class(settings.head_timeout_s, settings.max_connections),
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="on",
            timeout_keep_alive=_IDLE_S,
            timeout_graceful_shutdown=round(settings.drain_timeout_s + _GRACE_S),
        )
        super().__init__(config)

    def handle_exit(self, sig: int, _frame: FrameType | None) -> None:
        """Begin to drain at the first signal; at a second SIGINT stop at once."""
        # Not the inherited one: it raises the signal again at the end, which would hide the exit status.
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting; requests go on until the drain is over."""
        _LOG.info("stopping drain_s=%g", self.gateway.settings.drain_timeout_s)
        self._drain = asyncio.create_task(self.gateway.drain())
        try:
            await super().shutdown(sockets)
        finally:
            self._drain.cancel()


def serve(settings: Settings, listener: socket.socket) -> bool:
    """Serve until a signal; whether start-up succeeded."""
    host, port = listener.getsockname()[:2]
    _LOG.info(
        "listening url=http://%s:%d engine=%s",
        f"[{host}]" if ":" in host else host,
        port,
        settings.engine_url,
    )
    server = Server(settings)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
        signal.signal(signal.SIGHUP, server.handle_exit)
    server.run(sockets=[listener])
    return server.started
