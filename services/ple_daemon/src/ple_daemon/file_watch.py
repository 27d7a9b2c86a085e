"""Notices that a table's files were replaced, resized or rewritten under the daemon."""

import os
import threading
from pathlib import Path

import numpy as np


class FileWatch:
    """Compares size, mtime and inode with what they were when the files were opened. A change is for good.

    `changed` is int64 [1], 1 from the first change on: what kernels look at.
    """

    def __init__(self, files: dict[Path, int]) -> None:
        self._expected = {path: _identity(os.fstat(fd)) for path, fd in files.items()}
        self._lock = threading.Lock()
        self._change: str | None = None
        self.changed = np.zeros(1, np.int64)

    @property
    def change(self) -> str | None:
        """What `check` found, or None. Cheap."""
        return self._change

    def check(self) -> str | None:
        """Look at every file again; returns and remembers the first change."""
        with self._lock:
            if self._change is None:
                self._change = self._find()
                self.changed[0] = self._change is not None
            return self._change

    def _find(self) -> str | None:
        for path, expected in self._expected.items():
            try:
                found = _identity(path.stat())
            except OSError as error:
                return f"{path} is gone ({error.strerror})"
            for what, was, now in zip(("inode", "size", "mtime"), expected, found, strict=True):
                if was != now:
                    return f"{path} changed ({what} {was} is now {now})"
        return None


def _identity(status: os.stat_result) -> tuple[tuple[int, int], int, int]:
    return (status.st_dev, status.st_ino), status.st_size, status.st_mtime_ns
