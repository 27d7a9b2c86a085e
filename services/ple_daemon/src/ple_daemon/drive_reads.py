"""Random 4 KiB reads past the page cache, many at once: what a drive can do at most.

Linux AIO through plain system calls: it is asynchronous for O_DIRECT, is allowed where a container's seccomp
profile forbids io_uring, and needs no library. One kernel submits, sleeps in io_getevents and refills.
"""

import errno as codes
import mmap
import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numba import njit, types

from ple_daemon.errors import DaemonError
from ple_daemon.gather import Int64Array
from ple_daemon.native import errno, syscall

READ_BYTES = 4096
MAX_DEPTH = 128

_SETUP, _DESTROY, _SUBMIT, _GETEVENTS = (
    (0, 1, 2, 4) if platform.machine() == "aarch64" else (206, 207, 209, 208)
)
# struct iocb and struct io_event in 64-bit words, little-endian; opcode 0 (IOCB_CMD_PREAD) shares the fd's.
_IOCB_WORDS, _EVENT_WORDS = 8, 4
_FD_SHIFT = 32
_EINTR, _EAGAIN, _EIO, _ETIMEDOUT = codes.EINTR, codes.EAGAIN, codes.EIO, codes.ETIMEDOUT
# A drive that completes nothing for so long is given up.
_PATIENCE_S = 30
_MONOTONIC = 1
_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")

_clock_gettime: Any = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.int64))


class DirectReadError(DaemonError):
    """A file that cannot be read past the page cache."""


@dataclass(frozen=True, slots=True)
class Reads:
    """What one call of `DirectFile.read` did; `latencies_ns` int64 [count], in order of completion."""

    seconds: float
    latencies_ns: Int64Array

    @property
    def count(self) -> int:
        return len(self.latencies_ns)

    @property
    def per_second(self) -> float:
        return self.count / self.seconds


class DirectFile:
    """A file opened with O_DIRECT and buffers for `MAX_DEPTH` reads. One thread at a time."""

    def __init__(self, path: Path) -> None:
        """Raises DirectReadError where reads would come from memory or O_DIRECT is not supported."""
        self.fd = open_direct(path)
        self.path = path
        self.blocks = os.fstat(self.fd).st_size // READ_BYTES
        self._buffers = mmap.mmap(-1, MAX_DEPTH * READ_BYTES)
        self._address = np.frombuffer(self._buffers, np.uint8).ctypes.data
        self._context = np.zeros(1, np.int64)
        number = _setup(self._context)
        if number:
            os.close(self.fd)
            raise DirectReadError(f"io_setup: {os.strerror(number)}; /proc/sys/fs/aio-max-nr limits it")
        self.read(np.zeros(1, np.int64), 1)  # compiled here, not within somebody's measurement

    def read(self, offsets: Int64Array, depth: int, seconds: float = 3600.0) -> Reads:
        """Read 4 KiB at each of `offsets` (multiples of 4,096), `depth` at once, until done or time is up.

        Raises DirectReadError for a read that fails.
        """
        if not 1 <= depth <= MAX_DEPTH:
            raise ValueError(f"depth {depth} is outside 1 to {MAX_DEPTH}")
        latencies_ns = np.zeros(len(offsets), np.int64)
        start_s = time.perf_counter()
        deadline_ns = time.monotonic_ns() + int(seconds * 1e9)
        done = _read(int(self._context[0]), self.fd, offsets, self._address, depth, deadline_ns, latencies_ns)
        if done < 0:
            raise DirectReadError(f"{self.path}: a direct read failed: {os.strerror(-done)}")
        return Reads(time.perf_counter() - start_s, latencies_ns[:done])

    def random_offsets(self, rng: np.random.Generator, count: int) -> Int64Array:
        """Offsets of whole blocks of the file, int64 [count]."""
        return rng.integers(0, self.blocks, count) * READ_BYTES

    def close(self) -> None:
        _destroy(int(self._context[0]))
        os.close(self.fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def refuse_memory(path: Path) -> None:
    """Raises DirectReadError for a path on a filesystem that no drive is behind."""
    kind = filesystem(path)
    if kind in _IN_MEMORY:
        raise DirectReadError(
            f"{path}: lies in memory ({kind}), there is no drive to read; name another path"
        )


def open_direct(path: Path) -> int:
    """A descriptor whose reads go to the drive. Raises DirectReadError where there is no such thing."""
    refuse_memory(path)
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == codes.EINVAL:
            raise DirectReadError(
                f"{path}: the file system ({filesystem(path)}) has no O_DIRECT; name another path"
            ) from error
        raise DirectReadError(f"{path}: cannot be opened: {error.strerror}") from error


def filesystem(path: Path) -> str:
    """Type of the file system that holds `path`, or "unknown"."""
    try:
        device = path.stat().st_dev
    except OSError as error:
        raise DirectReadError(f"{path}: {error.strerror}") from error
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        if left.split()[2] == wanted:
            return right.split()[0]
    return "unknown"


@njit(nogil=True, cache=True)
def _setup(context: Int64Array) -> int:
    return int(errno()) if syscall(_SETUP, MAX_DEPTH, context.ctypes.data, 0, 0, 0, 0) != 0 else 0


@njit(nogil=True, cache=True)
def _destroy(context: int) -> None:
    syscall(_DESTROY, context, 0, 0, 0, 0, 0)


@njit(nogil=True, cache=True)
def _now_ns(clock: Int64Array) -> int:
    _clock_gettime(_MONOTONIC, clock.ctypes.data)
    return int(clock[0] * 1_000_000_000 + clock[1])


@njit(nogil=True, cache=True)
def _read(  # noqa: C901 - one loop that must not leave native code
    context: int,
    fd: int,
    offsets: Int64Array,
    buffers: int,
    depth: int,
    deadline_ns: int,
    latencies_ns: Int64Array,
) -> int:
    """Number of reads completed, or minus the errno of a failed one. Nothing is in flight afterwards."""
    clock = np.zeros(2, np.int64)
    patience = np.array([_PATIENCE_S, 0], np.int64)
    iocbs = np.zeros((depth, _IOCB_WORDS), np.int64)
    events = np.zeros((depth, _EVENT_WORDS), np.int64)
    pointers = np.zeros(depth, np.int64)
    started_ns = np.zeros(depth, np.int64)
    free = np.zeros(depth, np.int64)
    for slot in range(depth):
        free[slot] = slot
    free_count, next_read, done, failure = depth, 0, 0, 0
    while True:
        now_ns = _now_ns(clock)
        batch = 0
        while (
            batch < free_count and next_read + batch < offsets.size and now_ns < deadline_ns and failure == 0
        ):
            slot = free[free_count - 1 - batch]
            iocbs[slot, 0] = slot
            iocbs[slot, 2] = fd << _FD_SHIFT
            iocbs[slot, 3] = buffers + slot * READ_BYTES
            iocbs[slot, 4] = READ_BYTES
            iocbs[slot, 5] = offsets[next_read + batch]
            pointers[batch] = iocbs.ctypes.data + slot * _IOCB_WORDS * 8
            started_ns[slot] = now_ns
            batch += 1
        if batch:
            sent = syscall(_SUBMIT, context, batch, pointers.ctypes.data, 0, 0, 0)
            if sent < 0:
                number = errno()
                sent = 0
                if number != _EAGAIN or free_count == depth:
                    failure = number
            free_count -= sent
            next_read += sent
        if free_count == depth:
            return -failure if failure else done
        got = syscall(_GETEVENTS, context, 1, depth, events.ctypes.data, patience.ctypes.data, 0)
        if got < 0:
            if errno() == _EINTR:
                continue
            return -errno()
        if got == 0:
            return -_ETIMEDOUT
        now_ns = _now_ns(clock)
        for index in range(got):
            slot = events[index, 0]
            free[free_count] = slot
            free_count += 1
            if events[index, 2] != READ_BYTES:
                failure = -events[index, 2] if events[index, 2] < 0 else _EIO
                continue
            latencies_ns[done] = now_ns - started_ns[slot]
            done += 1
