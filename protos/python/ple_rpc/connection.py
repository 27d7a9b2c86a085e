"""One gRPC connection to the daemon, proven alive before it is used and never reused once it failed."""

import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any, Protocol, cast

import grpc

from ple_rpc import errors
from ple_rpc.lookup_stream import LookupStream
from ple_rpc.session import Lease, Session
from ple_rpc.table.v1 import table_pb2, table_service_pb2, table_service_pb2_grpc

PROTOCOL_VERSION = 1
TLS_SCHEME = "tls://"
MAX_MESSAGE_BYTES = 16 * 1024 * 1024

# An open stream holds a thread of the daemon.
_MAX_IDLE_STREAMS = 2

_CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # Reconnecting is the client's work: a channel of ours lives as long as one connection, and must not
    # wait out the back-off that the process's shared pool remembers for the address.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.enable_retries", 0),
    # A local socket: an HTTP proxy from the environment has no business in between.
    ("grpc.enable_http_proxy", 0),
)


class _Stub(Protocol):
    """The calls of the generated stub, with types."""

    def Describe(  # noqa: N802
        self, request: table_service_pb2.DescribeRequest, timeout: float
    ) -> table_service_pb2.DescribeResponse: ...
    def Attach(  # noqa: N802
        self, request: table_service_pb2.AttachRequest
    ) -> Iterator[table_service_pb2.AttachResponse]: ...
    def Prefetch(  # noqa: N802
        self, request: table_service_pb2.PrefetchRequest, timeout: float
    ) -> table_service_pb2.PrefetchResponse: ...
    def CancelPrefetch(  # noqa: N802
        self, request: table_service_pb2.CancelPrefetchRequest, timeout: float
    ) -> table_service_pb2.CancelPrefetchResponse: ...
    def LookupStream(  # noqa: N802
        self, requests: Iterable[table_service_pb2.LookupStreamRequest]
    ) -> Iterator[table_service_pb2.LookupStreamResponse]: ...
    def Stats(  # noqa: N802
        self, request: table_service_pb2.StatsRequest, timeout: float
    ) -> table_service_pb2.StatsResponse: ...


class Connection:
    """Calls on one channel. Every call has a deadline and raises an exception of `errors`."""

    def __init__(self, address: str, credentials: grpc.ChannelCredentials | None = None) -> None:
        self._channel = _channel(address, credentials)
        stub: Any = table_service_pb2_grpc.TableServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._stub = cast("_Stub", stub)
        self._idle_streams: list[LookupStream] | None = []  # None: closed
        self._idle_lock = threading.Lock()
        self.session: Session | None = None

    @property
    def is_lost(self) -> bool:
        """The session that was opened here has ended: what is left of the connection is not worth keeping."""
        return self.session is not None and self.session.is_lost

    def attach(self, request: table_service_pb2.AttachRequest, timeout_s: float) -> Lease:
        return Lease(self._stub.Attach(request), timeout_s)

    def describe(self, timeout_s: float) -> table_service_pb2.DescribeResponse:
        try:
            return self._stub.Describe(table_service_pb2.DescribeRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            raise errors.from_rpc_error(error) from error

    def prefetch(self, request: table_service_pb2.PrefetchRequest, timeout_s: float) -> bool:
        self._sign(request)
        try:
            return self._stub.Prefetch(request, timeout=timeout_s).accepted
        except grpc.RpcError as error:
            raise errors.from_rpc_error(error) from error

    def cancel_prefetch(self, request: table_service_pb2.CancelPrefetchRequest, timeout_s: float) -> bool:
        self._sign(request)
        try:
            return self._stub.CancelPrefetch(request, timeout=timeout_s).cancelled
        except grpc.RpcError as error:
            raise errors.from_rpc_error(error) from error

    def lookup(self, requests: list[table_service_pb2.LookupRequest], timeout_s: float) -> bytes:
        """Rows of several lookups, concatenated in order, over a stream that is kept for the next lookup."""
        stream = self._take_stream()
        try:
            rows = stream.lookup(requests, timeout_s)
        except BaseException:
            stream.close()
            raise
        self._keep(stream)
        return rows

    def _take_stream(self) -> LookupStream:
        with self._idle_lock:
            if self._idle_streams:
                return self._idle_streams.pop()
        return LookupStream(self._stub.LookupStream)

    def _keep(self, stream: LookupStream) -> None:
        """For the next lookup, unless enough are kept or the connection was closed meanwhile."""
        with self._idle_lock:
            idle = self._idle_streams
            if stream.is_open and idle is not None and len(idle) < _MAX_IDLE_STREAMS:
                idle.append(stream)
                return
        stream.close()

    def _sign(
        self, hint: table_service_pb2.PrefetchRequest | table_service_pb2.CancelPrefetchRequest
    ) -> None:
        """Make the hint the session's, where there is one: it then ends with the session."""
        if self.session is not None:
            hint.session_token = self.session.lease.token

    def stats(self, timeout_s: float) -> table_service_pb2.StatsResponse:
        try:
            return self._stub.Stats(table_service_pb2.StatsRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            raise errors.from_rpc_error(error) from error

    def close(self) -> None:
        if self.session is not None:
            self.session.close()
        with self._idle_lock:
            idle, self._idle_streams = self._idle_streams or [], None
        for stream in idle:
            stream.close()
        self._channel.close()


def _channel(address: str, credentials: grpc.ChannelCredentials | None) -> grpc.Channel:
    if credentials is None:
        return grpc.insecure_channel(address, options=_CHANNEL_OPTIONS)
    return grpc.secure_channel(address.removeprefix(TLS_SCHEME), credentials, options=_CHANNEL_OPTIONS)


def open_connection(
    address: str,
    expected_fingerprint: bytes | None,
    timeout_s: float,
    credentials: grpc.ChannelCredentials | None = None,
) -> tuple[Connection, table_service_pb2.DescribeResponse]:
    """A connection whose peer answered Describe with the expected table.

    Raises TableUnavailable when nobody answers in `timeout_s`, TableChanged for another table and
    BadRequest for a daemon that speaks another version of the protocol.
    """
    connection = Connection(address, credentials)
    try:
        described = connection.describe(timeout_s)
        _check(described, expected_fingerprint, address)
    except BaseException:
        connection.close()
        raise
    return connection, described


def _check(
    described: table_service_pb2.DescribeResponse, expected_fingerprint: bytes | None, address: str
) -> None:
    if described.protocol_version != PROTOCOL_VERSION:
        raise errors.BadRequest(
            f"the daemon at {address} speaks protocol {described.protocol_version}, this client "
            f"{PROTOCOL_VERSION}: run the same release on both sides"
        )
    if described.table.row_type == table_pb2.ROW_TYPE_UNSPECIFIED:
        raise errors.BadRequest(f"the daemon at {address} serves a row type that this client does not know")
    if expected_fingerprint not in (None, described.fingerprint):
        raise errors.TableChanged(
            f"the daemon at {address} now serves another table (fingerprint "
            f"{described.fingerprint.hex()[:16]}, expected {expected_fingerprint.hex()[:16]}): "
            "restart inference to use it"
        )


def remaining_s(deadline: float) -> float:
    """Seconds until a time of the monotonic clock, never negative."""
    return max(0.0, deadline - time.monotonic())
