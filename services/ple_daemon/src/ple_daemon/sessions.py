"""Sessions: who is attached, and what ends with them. A session lives as long as its Attach stream."""

import logging
import os
import queue
import threading
from collections.abc import Callable, Iterator

from ple_daemon.prefetch import Prefetcher
from ple_daemon.shm_region import MappedRegion
from ple_rpc.bell import TOKEN_BYTES
from ple_rpc.errors import BadRequest, QuotaExceeded, TableChanged
from ple_rpc.table.v1 import table_service_pb2

_log = logging.getLogger(__name__)

_MAX_NAME_CHARS = 64
# A client that does not read its stream misses events beyond these.
_MAX_EVENTS = 16

Event = table_service_pb2.AttachResponse


class Session:
    """One attached client."""

    def __init__(self, name: str) -> None:
        self.token = os.urandom(TOKEN_BYTES)
        self.name = "".join(c for c in name[:_MAX_NAME_CHARS] if c.isprintable()) or "unnamed"
        self.region: MappedRegion | None = None
        self.closed = False
        self._events: queue.Queue[Event | None] = queue.Queue(_MAX_EVENTS + 1)

    def events(self) -> Iterator[Event]:
        """What the client is to hear, until the session ends."""
        while (event := self._events.get()) is not None:
            yield event

    def tell(self, event: Event) -> None:
        """Queue an event; lost when too many wait."""
        if self._events.qsize() < _MAX_EVENTS:
            self._events.put_nowait(event)

    def end(self) -> None:
        """Let `events` return."""
        try:
            self._events.put_nowait(None)
        except queue.Full:
            self._events.get_nowait()
            self._events.put_nowait(None)


class Sessions:
    """All attached clients, by token. Thread-safe."""

    def __init__(self, prefetcher: Prefetcher, give_up: Callable[[MappedRegion], None], limit: int) -> None:
        """`give_up` is called with the region of a session that ends."""
        self._prefetcher = prefetcher
        self._give_up = give_up
        self._limit = limit
        self._lock = threading.Lock()
        self._by_token: dict[bytes, Session] = {}

    def __len__(self) -> int:
        return len(self._by_token)

    def open(self, name: str) -> Session:
        """A new session. Raises QuotaExceeded."""
        session = Session(name)
        with self._lock:
            if len(self._by_token) >= self._limit:
                raise QuotaExceeded(f"{self._limit} sessions are open, no more are taken")
            self._by_token[session.token] = session
        _log.info("session opened client=%s session=%s", session.name, session.token.hex()[:8])
        return session

    def close(self, session: Session) -> None:
        """End a session: its prefetches are dropped, its region is given up."""
        with self._lock:
            if session.closed:
                return
            session.closed = True
            del self._by_token[session.token]
            region = session.region
        session.end()
        self._prefetcher.cancel_session(session.token)
        if region is not None:
            self._give_up(region)
        _log.info("session closed client=%s session=%s", session.name, session.token.hex()[:8])

    def require(self, token: bytes) -> Session:
        """The session of a token. Raises TableChanged for a token that opens none."""
        session = self._by_token.get(token)
        if session is None:
            raise TableChanged(
                "unknown session: this daemon gave out no such token, or the session has ended"
            )
        return session

    def adopt(self, session: Session, region: MappedRegion) -> None:
        """Bind a region to a session, once. Raises BadRequest, or TableChanged when the session has ended."""
        with self._lock:
            if session.closed:
                raise TableChanged("the session has ended")
            if session.region is not None:
                raise BadRequest("the session has a region already")
            session.region = region

    def announce(self, event: Event) -> None:
        """Tell every client."""
        with self._lock:
            sessions = list(self._by_token.values())
        for session in sessions:
            session.tell(event)
