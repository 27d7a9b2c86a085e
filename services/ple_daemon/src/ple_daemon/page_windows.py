"""Kernels of the prefetcher: rows to page windows that were not seen before, and reading those.

A window is (address, bytes, segment), int64 [n, 3], aligned to pages.
"""

import mmap

import numpy as np
import numpy.typing as npt
from numba import njit

from ple_daemon.gather import Advice, Int64Array, SegmentColumn, segment_of
from ple_daemon.native import (
    MADV_POPULATE_READ,
    MADV_WILLNEED,
    POSIX_FADV_WILLNEED,
    PROCESS_MADVISE,
    errno,
    madvise,
    posix_fadvise,
    syscall,
)

_PAGE = mmap.PAGESIZE
_FIRST_ROW, _ADDRESS = int(SegmentColumn.FIRST_ROW), int(SegmentColumn.ADDRESS)
_FD, _OFFSET = int(SegmentColumn.FD), int(SegmentColumn.OFFSET)
_FADVISE, _MADVISE = int(Advice.POSIX_FADVISE), int(Advice.PROCESS_MADVISE)


@njit(nogil=True, cache=True)
def collect_windows(
    ids: Int64Array, places: Int64Array, row_bytes: int, first_address: int, bitmap: npt.NDArray[np.uint8]
) -> Int64Array:
    """Windows of rows whose pages are not in `bitmap` yet (a bit a page of the region), in order of `ids`.

    Ids must be valid. A row that straddles pages is one window.
    """
    windows = np.empty((ids.size, 3), np.int64)
    count = 0
    for index in range(ids.size):
        segment = segment_of(places, ids[index])
        start = places[segment, _ADDRESS] + (ids[index] - places[segment, _FIRST_ROW]) * row_bytes
        first = (start - first_address) // _PAGE
        last = (start + row_bytes - 1 - first_address) // _PAGE
        fresh = False
        for page in range(first, last + 1):
            bit = np.uint8(1 << (page & 7))
            if not bitmap[page >> 3] & bit:
                bitmap[page >> 3] |= bit
                fresh = True
        if fresh:
            windows[count, 0] = first_address + first * _PAGE
            windows[count, 1] = (last + 1 - first) * _PAGE
            windows[count, 2] = segment
            count += 1
    return windows[:count]


@njit(nogil=True, cache=True)
def read_windows(windows: Int64Array, places: Int64Array, advice: int, pidfd: int) -> None:
    """Start reading at most 1,024 windows."""
    iovec = np.empty((windows.shape[0], 2), np.int64)
    for index in range(windows.shape[0]):
        if advice == _FADVISE:
            place = places[windows[index, 2]]
            offset = place[_OFFSET] + windows[index, 0] - place[_ADDRESS]
            posix_fadvise(place[_FD], offset, windows[index, 1], POSIX_FADV_WILLNEED)
        iovec[index, 0] = windows[index, 0]
        iovec[index, 1] = windows[index, 1]
    if advice == _MADVISE and windows.shape[0]:
        syscall(PROCESS_MADVISE, pidfd, iovec.ctypes.data, windows.shape[0], MADV_WILLNEED, 0, 0)


@njit(nogil=True, cache=True)
def populate_windows(windows: Int64Array) -> int:
    """Wait for the windows' pages and map them. Returns 0 or the errno of the first that cannot be read.

    Reports a truncated file as EFAULT, where touching the page would be a SIGBUS.
    """
    for index in range(windows.shape[0]):
        if madvise(windows[index, 0], windows[index, 1], MADV_POPULATE_READ) != 0:
            return errno()
    return 0
