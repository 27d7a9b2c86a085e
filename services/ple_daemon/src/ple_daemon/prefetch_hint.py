"""One prompt that is to be read ahead: its rows as windows of pages, and how far it has come."""

import time
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from ple_daemon.gather import Int64Array
from ple_daemon.page_windows import collect_windows
from ple_daemon.table import Table

Key = tuple[bytes, str]
Bitmap = npt.NDArray[np.uint8]


class Hint:
    """A prompt that waits or is being read. `is_dropped` is set by whoever no longer wants it."""

    def __init__(
        self, key: Key, epoch: int, tokens: npt.NDArray[np.integer], context: npt.NDArray[np.integer]
    ) -> None:
        self.key = key
        self.epoch = epoch
        self.is_dropped = False
        self.pages_read = 0
        self.rows_served_before = 0
        self.arrived_s = time.monotonic()
        self.moved_s = self.arrived_s
        self._tokens = tokens
        self._context = context

    def begin(self, rows_served: int) -> None:
        """Start of reading; `rows_served` is the table's count, from which progress of the user is told."""
        self.rows_served_before = rows_served
        self.moved_s = time.monotonic()

    def pages_ahead(self, rows_served: int) -> int:
        """Pages read beyond what lookups have used since the start. A row costs about one page."""
        return self.pages_read - (rows_served - self.rows_served_before)

    def windows(
        self, table: Table, bitmap: Bitmap, size: Callable[[], int]
    ) -> Iterator[tuple[Int64Array, int]]:
        """At most `size()` windows of pages not yet in `bitmap` at a time, and the rows complete then."""
        for rows in table.hash.pieces(self._tokens, self._context):
            pages = collect_windows(
                rows.reshape(-1), table.places, table.layout.row_bytes, table.first_address, bitmap
            )
            start, end = 0, -1
            while end < len(pages):
                end = start + size()
                yield pages[start:end], rows.size if end >= len(pages) else 0
                start = end
