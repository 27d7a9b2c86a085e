"""The gRPC server on the run directory's socket, with health and reflection."""

from concurrent import futures

import grpc
from grpc_health.v1 import health as grpc_health
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from ple_daemon.errors import EndpointError
from ple_daemon.remote_endpoint import RemoteEndpoint
from ple_daemon.run_directory import RunDirectory
from ple_daemon.servicer import MAX_MESSAGE_BYTES, TableServicer
from ple_rpc.rundir import TABLE_SOCKET_NAME
from ple_rpc.table.v1 import table_service_pb2, table_service_pb2_grpc

_SERVICE = table_service_pb2.DESCRIPTOR.services_by_name["TableService"].full_name
_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),
)
# Of the silence that a client's host may keep: an HTTP/2 ping goes out after this share of it.
_PING_AFTER = 0.6
_FLUSH_S = 0.5


class RpcServer:
    """Serves from `start` to `stop`. An open stream holds one of `max_calls` threads as long as it lives."""

    def __init__(
        self,
        servicer: TableServicer,
        run_dir: RunDirectory,
        max_calls: int,
        silence_s: float,
        remote: RemoteEndpoint | None = None,
    ) -> None:
        """`silence_s` is how long a client's host may be dumb, `remote` where other hosts are served too."""
        self.remote_port: int | None = None
        self._run_dir = run_dir
        self._remote = remote
        self._pool = futures.ThreadPoolExecutor(max_calls, thread_name_prefix="rpc")
        options = [*_OPTIONS, *_keepalive(silence_s)]
        self._server = grpc.server(self._pool, options=options, maximum_concurrent_rpcs=max_calls)
        self._health = grpc_health.HealthServicer()
        add_table = table_service_pb2_grpc.add_TableServiceServicer_to_server
        add_table(servicer, self._server)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            (_SERVICE, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME),
            self._server,
        )

    def start(self) -> None:
        """Bind, serve, and only then appear under the public name. Raises EndpointError."""
        private = self._run_dir.private_path(TABLE_SOCKET_NAME)
        self._bind(f"unix:{private.absolute()}", str(private), None)
        if self._remote is not None:
            what = f"--listen tcp://{self._remote.address}"
            self.remote_port = self._bind(self._remote.address, what, self._remote.credentials)
        self._server.start()
        self._set_health(health_pb2.HealthCheckResponse.SERVING)
        self._run_dir.publish(TABLE_SOCKET_NAME)

    def refuse(self) -> None:
        """Tell health watchers that this daemon no longer serves."""
        self._health.enter_graceful_shutdown()

    def stop(self) -> None:
        """Close the socket. Answers on their way get a moment to leave, idle streams are cancelled."""
        self._server.stop(_FLUSH_S).wait(2 * _FLUSH_S)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _bind(self, address: str, name: str, credentials: grpc.ServerCredentials | None) -> int:
        try:
            if credentials is None:
                bound = self._server.add_insecure_port(address)
            else:
                bound = self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise EndpointError(f"{name}: cannot be bound: {error}") from error
        if not bound:
            raise EndpointError(f"{name}: cannot be bound")
        return bound

    def _set_health(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for service in ("", _SERVICE):
            self._health.set(service, status)


def _keepalive(silence_s: float) -> tuple[tuple[str, int], ...]:
    """Ends the lease of a client whose host or network is gone: it closes no connection."""
    ping_ms = round(silence_s * _PING_AFTER * 1000)
    patience_ms = round(silence_s * 1000) - ping_ms
    return (
        ("grpc.keepalive_time_ms", ping_ms),
        ("grpc.keepalive_timeout_ms", patience_ms),
        # Which of the two ends a connection differs between releases of gRPC; this one's default is a minute.
        ("grpc.http2.ping_timeout_ms", patience_ms),
    )
