"""Ranks of a machine pin memory one after the other: two could both find room that is there once."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

# Pinning 60 GiB takes about half a minute.
_TURN_DEADLINE_S = 300.0
_POLL_INTERVAL_S = 0.05
_NOTE_BYTES = 200


class TurnTaken(RuntimeError):
    """Another process pins memory for too long."""


class PinningTurn:
    """A lock on a file of this user, held within `with`. The kernel frees it when its owner dies."""

    def __init__(
        self, purpose: str, *, path: Path | None = None, deadline_s: float = _TURN_DEADLINE_S
    ) -> None:
        self._purpose, self._deadline_s = purpose, deadline_s
        self._path = path or Path(tempfile.gettempdir()) / f"triplex-pinning-{os.getuid()}.lock"
        self._file = -1

    def __enter__(self) -> PinningTurn:
        """Raises TurnTaken, which names the owner."""
        try:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise TurnTaken(f"cannot open the lock {self._path}: {error.strerror}; remove it") from error
        try:
            self._wait()
            self._note_owner()
        except BaseException:
            os.close(self._file)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._file)

    def _note_owner(self) -> None:
        # Only for who waits: a full disk takes no note, and the lock is held all the same.
        with suppress(OSError):
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, f"process {os.getpid()}, {self._purpose}".encode()[:_NOTE_BYTES], 0)

    def _wait(self) -> None:
        deadline = time.monotonic() + self._deadline_s
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    owner = os.pread(self._file, _NOTE_BYTES, 0).decode(errors="replace") or "somebody"
                    raise TurnTaken(
                        f"no turn to pin {self._purpose} within {self._deadline_s:g} s: {owner} holds "
                        f"{self._path}"
                    ) from None
                time.sleep(_POLL_INTERVAL_S)
            else:
                return
