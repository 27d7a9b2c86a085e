"""Notices rows that were read ahead and were cold again when they were needed: prefetch came too early.

A byte for one page in 16 of the region: set when the page is read ahead, cleared at the first bulk lookup of
it, which asks mincore. Bytes, since the prefetcher and lookups write without a lock.
"""

import mmap
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit, types

from ple_daemon.counters import Counter
from ple_daemon.gather import Int64Array, SegmentColumn, segment_of

SAMPLING = 16
_PAGE = mmap.PAGESIZE
_FIRST_ROW, _ADDRESS = int(SegmentColumn.FIRST_ROW), int(SegmentColumn.ADDRESS)

_mincore: Any = types.ExternalFunction("mincore", types.int32(types.int64, types.int64, types.int64))


Marks = npt.NDArray[np.uint8]


class PrefetchMarks:
    """The marks of one mapped region, `values` for kernels, and what was learnt from them."""

    def __init__(self, first_address: int, size_bytes: int) -> None:
        self.checked = Counter()
        self.cold = Counter()
        self._first_address = first_address
        self.values: Marks = np.zeros(size_bytes // _PAGE // SAMPLING + 1, np.uint8)

    def set(self, windows: Int64Array) -> None:
        """Windows (see `page_windows`) that have just been read."""
        _set(windows, self._first_address, self.values)

    def check(self, ids: Int64Array, places: Int64Array, row_bytes: int) -> None:
        """Valid rows of a lookup that has not been advised yet."""
        checked, cold = check_marks(ids, places, row_bytes, self._first_address, self.values)
        if checked:
            self.checked.add(checked)
            self.cold.add(cold)


@njit(nogil=True, cache=True)
def _set(windows: Int64Array, first_address: int, marks: Marks) -> None:
    for index in range(windows.shape[0]):
        page = (windows[index, 0] - first_address) // _PAGE
        if page % SAMPLING == 0:
            marks[page // SAMPLING] = 1


@njit(nogil=True, cache=True)
def check_marks(
    ids: Int64Array, places: Int64Array, row_bytes: int, first_address: int, marks: Marks
) -> tuple[int, int]:
    """Clear the marks of valid rows that nobody has advised yet; returns how many, and how many were cold.

    `first_address` is that of the region.
    """
    answer = np.zeros(1, np.uint8)
    checked, cold = 0, 0
    for index in range(ids.size):
        place = places[segment_of(places, ids[index])]
        page = (place[_ADDRESS] + (ids[index] - place[_FIRST_ROW]) * row_bytes - first_address) // _PAGE
        if page % SAMPLING or not marks[page // SAMPLING]:
            continue
        marks[page // SAMPLING] = 0
        if _mincore(first_address + page * _PAGE, _PAGE, answer.ctypes.data) == 0:
            checked += 1
            cold += 1 - (answer[0] & 1)
    return checked, cold
