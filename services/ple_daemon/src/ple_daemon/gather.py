"""Kernels that turn row ids into bytes: find the segment, advise the pages, copy. All release the GIL.

Ids, addresses and offsets are int64 throughout: a 95 GiB table ends int32 arithmetic early. `places` is
int64 [segments, 5], see `SegmentColumn`; `iovec` is int64 [n, 2], a struct iovec array.
"""

import enum
import mmap
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from numba import njit

from ple_daemon.native import (
    MADV_WILLNEED,
    POSIX_FADV_WILLNEED,
    PROCESS_MADVISE,
    SEEK_END,
    errno,
    load,
    lseek,
    memcpy,
    page_faults,
    posix_fadvise,
    pread,
    syscall,
    usleep,
)
from ple_daemon.region import MappedSegment

Int64Array = npt.NDArray[np.int64]

_PAGE = mmap.PAGESIZE

SLICE_ROWS = 256
WINDOW_ROWS = 32
# What `copy_slice` knows of the rows ahead when none of them is advised.
WARM, UNKNOWN = -1, -2
_PROBE_ROWS = 32
_FIRST_PROBE_ROWS = 4
_NAP_US = 50
_PATIENCE_NAPS = 50


class Advice(enum.IntEnum):
    """How the kernel is told which pages come next."""

    NONE = 0
    POSIX_FADVISE = 1
    PROCESS_MADVISE = 2


class SegmentColumn(enum.IntEnum):
    """Columns of `places`."""

    FIRST_ROW = 0
    ADDRESS = 1
    FD = 2
    OFFSET = 3
    END = 4


_FIRST_ROW, _ADDRESS, _FD, _OFFSET, _END = (int(column) for column in SegmentColumn)
_NONE, _FADVISE, _MADVISE = int(Advice.NONE), int(Advice.POSIX_FADVISE), int(Advice.PROCESS_MADVISE)


def segment_places(segments: Sequence[MappedSegment]) -> Int64Array:
    """The kernels' view of the segments, int64 [segments, 5]."""
    places = np.empty((len(segments), len(SegmentColumn)), np.int64)
    first_row = 0
    for index, mapped in enumerate(segments):
        segment = mapped.segment
        places[index] = (first_row, mapped.address, mapped.fd, segment.offset_bytes, mapped.end_bytes)
        first_row += segment.rows
    return places


@njit(nogil=True, cache=True)
def segment_of(places: Int64Array, row: int) -> int:
    """Index of the segment that holds `row`, which must be a row of the table."""
    low, high = 0, places.shape[0]
    while high - low > 1:
        middle = (low + high) // 2
        if places[middle, _FIRST_ROW] <= row:
            low = middle
        else:
            high = middle
    return low


@njit(nogil=True, cache=True)
def first_bad(ids: Int64Array, rows: int) -> int:
    """Index of the first id outside [0, rows), or -1."""
    for index in range(ids.size):
        if ids[index] < 0 or ids[index] >= rows:
            return index
    return -1


@njit(nogil=True, cache=True)
def advise(ids: Int64Array, places: Int64Array, row_bytes: int, advice: int, pidfd: int) -> int:
    """Start reading the pages of valid `ids`, at most 1,024 of them. Returns how many ranges were advised."""
    if advice == _NONE:
        return 0
    iovec = np.empty((ids.size, 2), np.int64)
    for index in range(ids.size):
        place = places[segment_of(places, ids[index])]
        within = (ids[index] - place[_FIRST_ROW]) * row_bytes
        if advice == _FADVISE:
            posix_fadvise(place[_FD], place[_OFFSET] + within, row_bytes, POSIX_FADV_WILLNEED)
        else:
            start = place[_ADDRESS] + within
            first = start // _PAGE * _PAGE
            iovec[index, 0] = first
            iovec[index, 1] = (start + row_bytes - first + _PAGE - 1) // _PAGE * _PAGE
    if advice == _MADVISE:
        syscall(PROCESS_MADVISE, pidfd, iovec.ctypes.data, ids.size, MADV_WILLNEED, 0, 0)
    return ids.size


@njit(nogil=True, cache=True)
def copy(ids: Int64Array, places: Int64Array, row_bytes: int, target: int) -> None:
    """Copy the rows of valid `ids` from the mapping to the address `target`."""
    for index in range(ids.size):
        segment = segment_of(places, ids[index])
        source = places[segment, _ADDRESS] + (ids[index] - places[segment, _FIRST_ROW]) * row_bytes
        memcpy(target + index * row_bytes, source, row_bytes)


@njit(nogil=True, cache=True)
def are_files_whole(ids: Int64Array, places: Int64Array) -> bool:
    """False when a file of one of the rows is shorter than the table: its last page reads as zeros."""
    touched = np.zeros(places.shape[0], np.bool_)
    for index in range(ids.size):
        touched[segment_of(places, ids[index])] = True
    for segment in range(places.shape[0]):
        if touched[segment] and lseek(places[segment, _FD], 0, SEEK_END) < places[segment, _END]:
            return False
    return True


@njit(nogil=True, cache=True)
def advise_and_copy(
    ids: Int64Array, places: Int64Array, row_bytes: int, advice: int, pidfd: int, target: int
) -> bool:
    """A decode step's lookup in one call: advise all rows at once, then copy as they arrive.

    False when a file is shorter than the table, see `are_files_whole`.
    """
    advise(ids, places, row_bytes, advice, pidfd)
    copy(ids, places, row_bytes, target)
    return are_files_whole(ids, places)


@njit(nogil=True, cache=True)
def give_way(decoding: int) -> None:
    """Sleep while a decode step reads, but for so long only: bulk has a caller too.

    `decoding` is the address of `DecodeGate.active`.
    """
    for _ in range(_PATIENCE_NAPS):
        if load(decoding, 0) + load(decoding, 1) == 0:
            return
        usleep(_NAP_US)


@njit(nogil=True, cache=True)
def copy_slice(  # noqa: PLR0913, PLR0917 - a kernel takes scalars
    ids: Int64Array,
    count: int,
    places: Int64Array,
    row_bytes: int,
    advice: int,
    pidfd: int,
    target: int,
    ready: int,
    decoding: int,
) -> tuple[int, int]:
    """Copy the first `count` rows of `ids` to `target`; the rest of `ids` comes next and may be advised.

    Rows that are mapped already cost more to advise than to copy, and whether they are is not known without
    touching them. So rows are copied without advice as long as that meets no page faults, and in advised
    windows, each one window ahead of its copy, as long as it does. `ready` says how many rows at the start of
    `ids` were advised by the call before, or is WARM or UNKNOWN. Returns the next call's `ready` and how many
    rows were advised. For `decoding` see `give_way`.
    """
    done, advised = 0, 0
    while done < count:
        minor, major = page_faults()
        if ready < 0:
            end = min(count, done + (_PROBE_ROWS if ready == WARM else _FIRST_PROBE_ROWS))
        else:
            give_way(decoding)
            ready = max(ready, done)
            limit = min(ids.size, max(ready, done + WINDOW_ROWS) + WINDOW_ROWS)
            for start in range(ready, limit, WINDOW_ROWS):
                stop = min(limit, start + WINDOW_ROWS)
                advised += advise(ids[start:stop], places, row_bytes, advice, pidfd)
            ready = limit
            end = min(count, done + WINDOW_ROWS)
        copy(ids[done:end], places, row_bytes, target + done * row_bytes)
        minor_after, major_after = page_faults()
        minor, major = minor_after - minor, major_after - major
        if ready < 0:
            is_cold = major > 0 or minor * 8 > end - done
            ready = end if is_cold else WARM
        elif minor + major == 0:
            ready = WARM
        done = end
    return (ready - count if ready >= count else ready), advised


@njit(nogil=True, cache=True)
def read(ids: Int64Array, places: Int64Array, row_bytes: int, target: int) -> tuple[int, int]:
    """The same rows through pread: slower, exact about errors, never a signal.

    Returns (-1, 0), or the index of the first id that could not be read and its errno (0 for end of file).
    """
    for index in range(ids.size):
        place = places[segment_of(places, ids[index])]
        offset = place[_OFFSET] + (ids[index] - place[_FIRST_ROW]) * row_bytes
        done = 0
        while done < row_bytes:
            got = pread(place[_FD], target + index * row_bytes + done, row_bytes - done, offset + done)
            if got <= 0:
                return index, (errno() if got < 0 else 0)
            done += got
    return -1, 0
