"""Maps a table's segments into one reserved range of addresses: read-only, random access advised.

One range makes a page number a small integer (for the prefetch bitmap) and the SIGBUS test two comparisons.
"""

import ctypes
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ple_daemon.errors import TableRefusedError
from ple_daemon.table_format import Segment

PAGE_BYTES = mmap.PAGESIZE
_PROT_NONE = 0
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MADV_RANDOM = 1
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
]  # fmt: skip
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


@dataclass(frozen=True, slots=True)
class MappedSegment:
    """A segment with its open file and the address of its first row."""

    segment: Segment
    fd: int
    address: int
    end_bytes: int
    map_address: int
    map_bytes: int
    map_offset_bytes: int


class Region:
    """Owns the files and the mappings of one table."""

    def __init__(self, segments: Sequence[Segment], row_bytes: int) -> None:
        self._fds: dict[Path, int] = {}
        self.segments: list[MappedSegment] = []
        self.first_address = 0
        self.size_bytes = 0
        try:
            self._open(segments, row_bytes)
        except BaseException:
            self.close()
            raise

    def _open(self, segments: Sequence[Segment], row_bytes: int) -> None:
        spans = [_page_span(s.offset_bytes, s.offset_bytes + s.rows * row_bytes) for s in segments]
        self.size_bytes = sum(length for _, length in spans)
        self.first_address = map_memory(0, self.size_bytes, _PROT_NONE, _anonymous_flags(), -1, 0)
        at = self.first_address
        for segment, (first, length) in zip(segments, spans, strict=True):
            end = segment.offset_bytes + segment.rows * row_bytes
            fd = self._fd(segment.path, end)
            address = at + segment.offset_bytes - first
            self.segments.append(MappedSegment(segment, fd, address, end, at, length, first))
            at += length
        self.remap()

    def remap(self) -> None:
        """Map every segment (again): pages of zeros that the SIGBUS guard left behind are gone afterwards."""
        for mapped in self.segments:
            map_memory(
                mapped.map_address, mapped.map_bytes, mmap.PROT_READ,
                mmap.MAP_SHARED | _MAP_FIXED, mapped.fd, mapped.map_offset_bytes,
            )  # fmt: skip
        if _libc.madvise(self.first_address, self.size_bytes, _MADV_RANDOM) != 0:
            raise _os_error("madvise(MADV_RANDOM)")

    @property
    def files(self) -> dict[Path, int]:
        """Open descriptors by path."""
        return dict(self._fds)

    def close(self) -> None:
        """Unmap and close. No lookup may run."""
        if self.first_address:
            unmap_memory(self.first_address, self.size_bytes)
            self.first_address = 0
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _fd(self, path: Path, needed_bytes: int) -> int:
        if path not in self._fds:
            try:
                self._fds[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise TableRefusedError(f"{path}: cannot be opened: {error.strerror}") from error
        fd = self._fds[path]
        size = os.fstat(fd).st_size
        if size < needed_bytes:
            raise TableRefusedError(f"{path}: truncated: {size} bytes, the table needs {needed_bytes}")
        return fd


def _page_span(first: int, end: int) -> tuple[int, int]:
    start = first // PAGE_BYTES * PAGE_BYTES
    return start, -(-(end - start) // PAGE_BYTES) * PAGE_BYTES


def _anonymous_flags() -> int:
    return mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE


def map_memory(address: int, length: int, protection: int, flags: int, fd: int, offset: int) -> int:
    """mmap(2): the address of the mapping. Raises OSError."""
    mapped = _libc.mmap(address or None, length, protection, flags, fd, offset)
    if mapped is None or mapped == _FAILED:
        raise _os_error(f"mmap of {length} bytes")
    return int(mapped)


def unmap_memory(address: int, length: int) -> None:
    """munmap(2)."""
    _libc.munmap(address, length)


def _os_error(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")
