"""Runs every kernel once before the daemon says ready: the first time they are compiled."""

import numpy as np

from ple_daemon import gather
from ple_daemon.page_windows import collect_windows, populate_windows, read_windows
from ple_daemon.residency import resident
from ple_daemon.table import Table


def warm_up(table: Table) -> None:
    """Look the first row up in every way there is. The fingerprint has already run the bulk path."""
    row_bytes, places, advisor = table.layout.row_bytes, table.places, table.advisor
    table.lookup_tokens([0])
    ids = np.zeros(1, np.int64)
    gather.read(ids, places, row_bytes, np.empty(row_bytes, np.uint8).ctypes.data)
    seen = np.zeros(table.page_bitmap_bytes, np.uint8)
    windows = collect_windows(ids, places, row_bytes, table.first_address, seen)
    read_windows(windows, places, advisor.code, advisor.pidfd)
    populate_windows(windows)
    table.marks.set(windows)
    table.marks.check(ids, places, row_bytes)
    resident(windows[:, 0].copy())
