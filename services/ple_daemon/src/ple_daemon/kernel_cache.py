"""Decides where numba keeps compiled kernels. Call `prepare` before importing a module with kernels."""

import hashlib
import os
import shutil
import stat
import tempfile
from pathlib import Path

from ple_daemon.errors import DaemonError

# numba notices a change of the file that a kernel stands in, not of the files whose code it inlines.
_KERNEL_FILES = (
    "barrett.py",
    "cache_models.py",
    "drive_reads.py",
    "gather.py",
    "native.py",
    "ngram_hash.py",
    "page_windows.py",
    "prefetch_marks.py",
    "residency.py",
    "shm_board.py",
    "shm_kernels.py",
)
# What numba writes is about 2 MiB; it does not say where it ran out of space.
_ROOM_BYTES = 8 << 20


def prepare(wanted: Path | None) -> Path:
    """Use `wanted`, else the code's own __pycache__ when it can be written, else a private temporary folder.

    Cached kernels are machine code that will be run: a folder that others could write is refused.
    Raises DaemonError when `wanted` cannot be used.
    """
    beside_code = Path(__file__).parent / "__pycache__"
    is_beside = wanted is None and _is_writable(beside_code)
    folder = beside_code if is_beside else _private(wanted or _temporary())
    folder /= f"kernels-{_source_digest()}"
    if not folder.exists() and shutil.disk_usage(folder.parent).free < _ROOM_BYTES:
        raise DaemonError(
            f"kernel cache {folder.parent}: compiled kernels need {_ROOM_BYTES >> 20} MiB and less is free; "
            "set PLE_DAEMON_CACHE_DIR"
        )
    import numba  # after the settings are known to be right: it takes half a second

    numba.config.CACHE_DIR = str(folder)  # type: ignore[attr-defined]
    return folder


def _temporary() -> Path:
    try:
        return Path(tempfile.gettempdir()) / f"ple-daemon-kernels-{os.getuid()}"
    except FileNotFoundError as error:
        raise DaemonError(
            "kernel cache: neither the code's folder nor a temporary one can be written; "
            "set PLE_DAEMON_CACHE_DIR"
        ) from error


def _private(folder: Path) -> Path:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise DaemonError(f"kernel cache {folder}: {error.strerror}; set PLE_DAEMON_CACHE_DIR") from error
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise DaemonError(f"kernel cache {folder}: others can write there; set PLE_DAEMON_CACHE_DIR")
    if not _is_writable(folder):
        raise DaemonError(f"kernel cache {folder}: cannot be written; set PLE_DAEMON_CACHE_DIR")
    return folder


def _source_digest() -> str:
    digest = hashlib.sha256()
    for name in _KERNEL_FILES:
        digest.update((Path(__file__).parent / name).read_bytes())
    return digest.hexdigest()[:12]


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False
