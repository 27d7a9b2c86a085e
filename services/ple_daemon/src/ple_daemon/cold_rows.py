"""Rows that were never read before, proven to be out of the page cache: what a cold read is measured with."""

import ctypes
import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ple_daemon.errors import DaemonError
from ple_daemon.gather import Int64Array, SegmentColumn
from ple_daemon.region import PAGE_BYTES
from ple_daemon.residency import count_resident, is_visible
from ple_daemon.table import Table

_MADV_DONTNEED = 4
_TRIES = 64


class NotColdError(DaemonError):
    """Pages could not be dropped, or are used up: nothing cold can be measured."""


class ColdRows:
    """Draws rows of `tables`, which are opened on the same files, and drops them from cache and mappings."""

    def __init__(self, tables: Sequence[Table]) -> None:
        """Raises NotColdError when mincore would not tell this user what is cached."""
        self._tables = tables
        self._table = tables[0]
        self._paths = sorted({segment.path for segment in self._table.layout.segments})
        if not is_visible(self._paths):
            raise NotColdError(
                f"{self._paths[0]}: belongs to another user, so that the kernel does not say what is cached; "
                "run as the file's owner"
            )
        self._rng = np.random.default_rng()
        self._used = np.zeros(self._table.size_bytes // PAGE_BYTES + 1, np.bool_)
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.ids: Int64Array = np.zeros(0, np.int64)
        self.pages: Int64Array = np.zeros(0, np.int64)

    def draw(self, count: int) -> Int64Array:
        """`count` rows on pages that were neither drawn nor set aside, all of them cold; also kept as `ids`.

        `pages` then holds their distinct pages. Raises NotColdError.
        """
        self.ids = self._fresh(count)
        self.pages = np.unique(np.concatenate(self._pages_of(self.ids)))
        self._used[self.pages] = True
        self.evict()
        return self.ids

    def set_aside(self, ids: Int64Array) -> Int64Array:
        """Keep the pages of these rows from being drawn; returns the distinct pages."""
        pages = np.unique(np.concatenate(self._pages_of(ids)))
        self._used[pages] = True
        return pages

    def evict(self) -> None:
        """Drop the whole table from mappings and page cache. Raises NotColdError when `pages` stay cached."""
        for table in self._tables:
            address, size = ctypes.c_void_p(table.first_address), ctypes.c_size_t(table.size_bytes)
            self._libc.madvise(address, size, _MADV_DONTNEED)
        for path in self._paths:
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)  # dirty pages of a file just written cannot be dropped
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
        if cached := self.count_cached(self.pages):
            raise NotColdError(
                f"{self._paths[0]}: {cached} of {len(self.pages)} pages cannot be dropped from the "
                "page cache; stop what else has the table open (a running ple-daemon, a copy in progress)"
            )

    def count_cached(self, pages: Int64Array) -> int:
        """How many of these page numbers are in the page cache."""
        return count_resident(self._table.first_address + pages * PAGE_BYTES)

    def _fresh(self, count: int) -> Int64Array:
        chosen = np.zeros(0, np.int64)
        for _ in range(_TRIES):
            ids = self._rng.integers(0, self._table.layout.rows, 2 * (count - len(chosen)) + 16)
            first, last = self._pages_of(ids)
            ids = ids[~self._used[first] & ~self._used[last]]
            chosen = self._apart(np.concatenate([chosen, ids]))[:count]
            if len(chosen) == count:
                return chosen
        raise NotColdError(
            "too few pages are left that were not read yet: use a larger table or fewer rounds"
        )

    def _apart(self, ids: Int64Array) -> Int64Array:
        """Rows that share no page with one before them, in the order they came."""
        first, last = self._pages_of(ids)
        straddles = first != last
        owners = np.concatenate([np.arange(len(ids)), np.flatnonzero(straddles)])
        pages = np.concatenate([first, last[straddles]])
        order = np.lexsort((owners, pages))
        repeats = np.zeros(len(pages), np.bool_)
        repeats[1:] = pages[order][1:] == pages[order][:-1]
        crowded = np.zeros(len(ids), np.bool_)
        crowded[owners[order][repeats]] = True
        kept: Int64Array = ids[~crowded]
        return kept

    def _pages_of(self, ids: Int64Array) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """First and last page of each row, counted from the start of the mapped range."""
        table = self._table
        places = table.places[
            np.searchsorted(table.places[:, SegmentColumn.FIRST_ROW], ids, side="right") - 1
        ]
        start = (
            places[:, SegmentColumn.ADDRESS]
            + (ids - places[:, SegmentColumn.FIRST_ROW]) * table.layout.row_bytes
            - table.first_address
        )
        return start // PAGE_BYTES, (start + table.layout.row_bytes - 1) // PAGE_BYTES
