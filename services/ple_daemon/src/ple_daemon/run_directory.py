"""One daemon per run directory: a lock first, then a socket that gets its name once it works."""

import fcntl
import os
from pathlib import Path

from ple_daemon.errors import EndpointError
from ple_rpc.rundir import TABLE_SOCKET_NAME, check_socket_path

_LOCK_NAME = "daemon.lock"
_SOCKET_MODE = 0o660


class RunDirectory:
    """Holds the lock from construction to `close`.

    A second gRPC server on the same path would quietly take it over, and the first one's stop would then
    delete the second's socket: hence the lock, a private name for binding, and a rename.
    """

    def __init__(self, path: Path) -> None:
        """Raises EndpointError when the path is too long, not ours, or locked by another daemon."""
        self.path = path
        self.socket_path = path / TABLE_SOCKET_NAME
        self.private_socket_path = path / f".t{os.getpid()}"
        try:
            check_socket_path(self.socket_path)
        except ValueError as error:
            raise EndpointError(str(error)) from error
        self._published: tuple[int, int] | None = None
        self._lock_fd = self._lock()
        for stale in path.glob(".t*"):
            stale.unlink()

    def publish(self) -> None:
        """Give the bound private socket its public name, replacing one that a dead daemon left."""
        self.private_socket_path.chmod(_SOCKET_MODE)
        status = self.private_socket_path.stat()
        self._published = (status.st_dev, status.st_ino)
        self.private_socket_path.rename(self.socket_path)

    def is_published(self) -> bool:
        """Whether clients that look for the socket find ours."""
        try:
            status = self.socket_path.stat()
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == self._published

    def close(self) -> None:
        """Remove the socket if it is still ours, and give the lock back."""
        if self.is_published():
            self.socket_path.unlink(missing_ok=True)
        os.close(self._lock_fd)

    def _lock(self) -> int:
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = self.path.stat()
            if status.st_uid not in (0, os.getuid()):
                raise EndpointError(
                    f"run directory {self.path}: belongs to another user; choose another --run-dir"
                )
            if status.st_uid == os.getuid() and status.st_mode & 0o007:
                self.path.chmod(status.st_mode & 0o770)
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
