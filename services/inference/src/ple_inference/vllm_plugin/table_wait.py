"""A few bytes of shared memory in which a worker tells the API server that it waits for the table.

The API server cannot ask a worker that waits: its calls queue behind the step. Times are of the system's
monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import mmap
import struct
import threading
from collections.abc import Callable
from pathlib import Path

_FIELDS = struct.Struct("<dQ")
_LOOK_S = 0.25


class TableWait:
    """Maps the file; the writer makes it. One writer, any number of readers, no lock: fields are words."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        """Raises OSError."""
        with path.open("w+b" if create else "r+b") as file:
            if create:
                file.write(bytes(_FIELDS.size))
                file.flush()
            self._map = mmap.mmap(file.fileno(), _FIELDS.size)

    def write(self, waiting_since_s: float | None, lookups: int) -> None:
        _FIELDS.pack_into(self._map, 0, waiting_since_s or 0.0, lookups)

    @property
    def waiting_since_s(self) -> float | None:
        """Since when some lookup has had no daemon to talk to."""
        return _FIELDS.unpack_from(self._map)[0] or None

    @property
    def lookups(self) -> int:
        """Lookups that ended with rows: it grows with every step."""
        count: int = _FIELDS.unpack_from(self._map)[1]
        return count

    def close(self) -> None:
        self._map.close()


class WaitReporter:
    """A thread that notes in the file what `progress` says: since when a lookup waits, and lookups so far."""

    def __init__(self, path: Path, progress: Callable[[], tuple[float | None, int]]) -> None:
        """Raises OSError."""
        self._wait = TableWait(path, create=True)
        self._progress = progress
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="table-wait", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join(2 * _LOOK_S)

    def _run(self) -> None:
        while not self._ended.wait(_LOOK_S):
            self._wait.write(*self._progress())
