"""The doorbell: a Unix socket where sessions hand in their regions. Rings go to the native threads."""

import array
import contextlib
import logging
import math
import os
import selectors
import socket
import struct
import threading
import time
from dataclasses import dataclass

from ple_daemon.errors import EndpointError
from ple_daemon.run_directory import RunDirectory
from ple_daemon.sessions import Sessions
from ple_daemon.shm_plane import ShmPlane
from ple_daemon.shm_region import MappedRegion
from ple_rpc.bell import BELL_NAME, GREETING_BYTES, parse_greeting, welcome
from ple_rpc.errors import BadRequest, NotPermitted, TableError, TableUnavailable, code_of
from ple_rpc.table.v1 import table_pb2

_log = logging.getLogger(__name__)

_GREETING_S = 5.0
_MAX_WAITING = 64
_LOOK_S = 1.0
_MAX_FDS = 4
_PEER = struct.Struct("3i")  # struct ucred: pid, uid, gid
_SO_PEERGROUPS = 59
_MAX_GROUPS = 64


@dataclass(frozen=True, slots=True)
class RegionTerms:
    """What a region must fit."""

    quotas: table_pb2.Limits
    row_bytes: int
    fingerprint: bytes
    client_gid: int | None


class Doorbell:
    """One thread: accepts connections, checks peers and regions, and collects what the plane gives up."""

    def __init__(
        self, run_dir: RunDirectory, plane: ShmPlane, sessions: Sessions, terms: RegionTerms
    ) -> None:
        """Raises EndpointError when the socket cannot be bound."""
        self._run_dir, self._plane, self._sessions, self._terms = run_dir, plane, sessions, terms
        self.path = run_dir.path / BELL_NAME
        self._listener = _listen(run_dir)
        self._waiting: dict[socket.socket, float] = {}
        self._resumes_s = math.inf
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(plane.notice, selectors.EVENT_READ, lambda _: plane.collect())
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="doorbell", daemon=True)

    def start(self) -> None:
        """Serve, and only then appear under the public name."""
        self._thread.start()
        self._run_dir.publish(BELL_NAME)

    def stop(self, timeout_s: float) -> None:
        """Close the socket; connections that were handed over are the plane's."""
        self._stopping = True
        os.eventfd_write(self._plane.notice, 1)
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        for connection in (*self._waiting, self._listener):
            connection.close()
        self._selector.close()

    def _run(self) -> None:
        while not self._stopping:
            for key, _ in self._selector.select(_LOOK_S):
                try:
                    key.data(key.fileobj)
                except Exception:
                    # One peer's oddity must not end the doorbell of all.
                    _log.exception("doorbell failed")
            self._dismiss_the_silent()
            self._resume()

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError as error:
            # Out of descriptors, most likely: the peer still waits, and would be tried again at once.
            _log.warning("doorbell pauses reason=%s", error.strerror)
            self._selector.unregister(listener)
            self._resumes_s = time.monotonic() + _LOOK_S
            return
        connection.setblocking(False)
        if len(self._waiting) >= _MAX_WAITING:
            connection.close()
            return
        self._waiting[connection] = time.monotonic() + _GREETING_S
        self._selector.register(connection, selectors.EVENT_READ, self._greet)

    def _resume(self) -> None:
        """Accept again, some time after that failed."""
        if time.monotonic() >= self._resumes_s:
            self._resumes_s = math.inf
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _dismiss_the_silent(self) -> None:
        now_s = time.monotonic()
        for connection in [c for c, deadline_s in self._waiting.items() if deadline_s < now_s]:
            self._take(connection).close()

    def _take(self, connection: socket.socket) -> socket.socket:
        del self._waiting[connection]
        self._selector.unregister(connection)
        return connection

    def _greet(self, connection: socket.socket) -> None:
        """Read a greeting and answer it. A connection that was not handed over is closed."""
        self._take(connection)
        fds: list[int] = []
        try:
            message, fds = _receive(connection)
            if not message:
                raise BadRequest("the peer closed without a greeting")
            self._check_peer(connection)
            self._attach(connection, message, fds)
        except TableError as error:
            _log.warning("region refused reason=%s", error)
            with contextlib.suppress(OSError):
                connection.send(welcome(code_of(error).value[0], str(error)))
            connection.close()
        except OSError as error:
            _log.warning("region refused reason=%s", error)
            connection.close()
        finally:
            for fd in fds:
                os.close(fd)

    def _attach(self, connection: socket.socket, message: bytes, fds: list[int]) -> None:
        try:
            session = self._sessions.require(parse_greeting(message))
        except ValueError as error:
            raise BadRequest(str(error)) from error
        if len(fds) != 1:
            raise BadRequest(f"a greeting carries one descriptor, this one {len(fds)}")
        terms = self._terms
        try:
            region = MappedRegion(fds[0], terms.quotas, terms.row_bytes, terms.fingerprint)
        except OSError as error:
            raise TableUnavailable(f"the region cannot be mapped: {error.strerror}") from error
        try:
            self._sessions.adopt(session, region)
            self._plane.seat(region, connection)
        except TableError:
            region.close()
            raise
        # The connection is the plane's now: it notices when the client is gone.
        with contextlib.suppress(OSError):
            connection.send(welcome(0))
        if session.closed:  # in between: whoever closed it may have found no seat to give up
            self._plane.give_up(region)
        _log.info(
            "region attached client=%s session=%s slots=%d max_rows=%d bytes=%d",
            session.name, session.token.hex()[:8], region.layout.slots, region.layout.max_rows,
            region.layout.size_bytes,
        )  # fmt: skip

    def _check_peer(self, connection: socket.socket) -> None:
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        _, uid, gid = _PEER.unpack(raw)
        if uid in (0, os.getuid()):
            return
        wanted = self._terms.client_gid
        if wanted is None or (wanted != gid and wanted not in _groups(connection)):
            raise NotPermitted(
                f"user {uid} may not attach: it is not the daemon's and not of the clients' group"
            )


def _groups(connection: socket.socket) -> list[int]:
    """The peer's supplementary groups."""
    raw = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 4 * _MAX_GROUPS)
    return list(array.array("I", raw))


def _receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    """One message and its descriptors, which the caller closes."""
    flags = socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
    room = socket.CMSG_SPACE(_MAX_FDS * 4)
    message, ancillary, _, _ = connection.recvmsg(GREETING_BYTES + 1, room, flags)
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % 4])
    return message, list(fds)


def _listen(run_dir: RunDirectory) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    path = run_dir.private_path(BELL_NAME)
    try:
        listener.bind(str(path))
        listener.listen(_MAX_WAITING)
    except OSError as error:
        listener.close()
        raise EndpointError(f"{path}: cannot be bound: {error.strerror}") from error
    listener.setblocking(False)
    return listener
