"""One daemon per run directory: a lock first, then sockets that get their names once they work."""

import fcntl
import os
import re
import stat
from pathlib import Path

from ple_daemon.errors import EndpointError
from ple_rpc.bell import BELL_NAME
from ple_rpc.rundir import TABLE_SOCKET_NAME, check_socket_path

_LOCK_NAME = "daemon.lock"
_SOCKET_MODE = 0o660
_PRIVATE_SOCKET = re.compile(r"\.[bt]\d+")
_OWN_NAMES = {_LOCK_NAME, TABLE_SOCKET_NAME, BELL_NAME}


class RunDirectory:
    """Holds the lock from construction to `close`.

    A second gRPC server on the same path would quietly take it over, and the first one's stop would then
    delete the second's socket: hence the lock, a private name for binding, and a rename.
    """

    def __init__(self, path: Path) -> None:
        """Raises EndpointError when the path is too long, not ours, or locked by another daemon."""
        self.path = path
        self.socket_path = path / TABLE_SOCKET_NAME
        try:
            for name in (TABLE_SOCKET_NAME, BELL_NAME):
                check_socket_path(path / name)
        except ValueError as error:
            raise EndpointError(str(error)) from error
        self._published: dict[str, tuple[int, int]] = {}
        self._lock_fd = self._lock()
        for stale in path.iterdir():
            if _PRIVATE_SOCKET.fullmatch(stale.name) and stat.S_ISSOCK(stale.lstat().st_mode):
                stale.unlink()

    def private_path(self, name: str) -> Path:
        """Where the socket that will be called `name` is bound."""
        return self.path / f".{name[0]}{os.getpid()}"

    def publish(self, name: str) -> None:
        """Give the bound private socket its public name, replacing one that a dead daemon left."""
        private = self.private_path(name)
        private.chmod(_SOCKET_MODE)
        status = private.stat()
        self._published[name] = (status.st_dev, status.st_ino)
        private.rename(self.path / name)

    def is_published(self) -> bool:
        """Whether clients that look for the sockets find ours."""
        return all(self._is_ours(name) for name in self._published)

    def close(self) -> None:
        """Remove the sockets that are still ours, and give the lock back."""
        for name in self._published:
            if self._is_ours(name):
                (self.path / name).unlink(missing_ok=True)
        os.close(self._lock_fd)

    def _is_ours(self, name: str) -> bool:
        try:
            status = (self.path / name).stat()
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == self._published[name]

    def _close_to_others(self, mode: int) -> None:
        """Take others' permissions away; a folder with something else in it, like /run, is refused."""
        names = {path.name for path in self.path.iterdir() if not _PRIVATE_SOCKET.fullmatch(path.name)}
        if names - _OWN_NAMES:
            raise EndpointError(
                f"run directory {self.path}: all users share it; choose another --run-dir, which may be new"
            )
        self.path.chmod(stat.S_IMODE(mode) & ~stat.S_IRWXO)  # setgid, which gives sockets their group, stays

    def _lock(self) -> int:
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = self.path.stat()
            if status.st_uid not in (0, os.getuid()):
                raise EndpointError(
                    f"run directory {self.path}: belongs to another user; choose another --run-dir"
                )
            if status.st_uid == os.getuid() and status.st_mode & 0o007:
                self._close_to_others(status.st_mode)
            fd = os.open(self.path / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise EndpointError(
                f"run directory {self.path}: {error.strerror}; choose another --run-dir"
            ) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(fd)
            raise EndpointError(
                f"run directory {self.path}: another ple-daemon uses it; stop it or choose another --run-dir"
            ) from error
        return fd
