"""One open table: rows by id, from the page cache or the drive, never wrong and never the daemon's end."""

import os
import threading
from typing import Self

import numpy as np
import numpy.typing as npt

from ple_daemon import gather
from ple_daemon.advice import Advisor
from ple_daemon.counters import TableCounters
from ple_daemon.decode_gate import DecodeGate
from ple_daemon.errors import TableRefusedError
from ple_daemon.file_watch import FileWatch
from ple_daemon.fingerprint import fingerprint
from ple_daemon.gather import SLICE_ROWS, WINDOW_ROWS, Advice, Int64Array
from ple_daemon.ngram_hash import NgramHash
from ple_daemon.prefetch_marks import PrefetchMarks
from ple_daemon.region import PAGE_BYTES, Region
from ple_daemon.sigbus import guard
from ple_daemon.table_format import TableLayout
from ple_rpc.errors import BadRow, RowsLost, TableChanged, TableError

Rows = npt.NDArray[np.uint8]

DECODE_MAX_ROWS = 64


class Table:
    """Rows of one table. Thread-safe."""

    def __init__(self, layout: TableLayout, advice: Advice | None = None) -> None:
        """Open and map the files, choose the advice (None: the best that works), take the fingerprint.

        Raises TableRefusedError.
        """
        self.layout = layout
        self._is_kept = False
        self.hash = NgramHash(layout.constants)
        self.gate = DecodeGate()
        self.counters = TableCounters()
        self._guard = guard()
        self._region = Region(layout.segments, layout.row_bytes)
        self.places = gather.segment_places(self._region.segments)
        self.marks = PrefetchMarks(self.first_address, self.size_bytes)
        self._guard.protect(self.first_address, self.first_address + self.size_bytes)
        self._repair_lock = threading.Lock()
        # The guard's count when the mapping was last made anew: while it is higher, zeros may be mapped.
        self.repaired = np.full(1, self._guard.faults, np.int64)
        self.watch = FileWatch(self._region.files)
        try:
            self.advisor = Advisor(self._region, advice)
        except TableRefusedError:
            self._unmap()
            raise
        try:
            self.fingerprint = fingerprint(layout, self.lookup)
        except TableError as error:
            self.close()
            raise TableRefusedError(str(error)) from error

    @property
    def first_address(self) -> int:
        return self._region.first_address

    @property
    def size_bytes(self) -> int:
        """Bytes of the mapped range, a multiple of the page size."""
        return self._region.size_bytes

    @property
    def page_bitmap_bytes(self) -> int:
        """Bytes of a bitmap with one bit for each page of the mapped range."""
        return -(-self.size_bytes // PAGE_BYTES // 8)

    def lookup(self, row_ids: npt.ArrayLike, out: Rows | None = None) -> Rows:
        """Rows as stored, uint8 [len(row_ids) * row_bytes], in `out` when given.

        The ids are copied first, so that a caller who shares their memory cannot change them after the check.
        Raises BadRow, RowsLost for rows that cannot be read, and TableChanged once a file has changed.
        """
        ids = np.array(row_ids, np.int64, copy=True).reshape(-1)
        bad = gather.first_bad(ids, self.layout.rows)
        if bad >= 0:
            raise BadRow(f"row {ids[bad]} is outside the table of {self.layout.rows} rows")
        self.refuse_if_changed()
        if out is None:
            out = np.empty(ids.size * self.layout.row_bytes, np.uint8)
        if ids.size <= DECODE_MAX_ROWS:
            with self.gate:
                self._lookup_decode(ids, out)
        else:
            self._lookup_bulk(ids, out)
        self.counters.lookups.add(1)
        self.counters.rows.add(ids.size)
        return out

    def lookup_tokens(self, tokens: npt.ArrayLike, context: npt.ArrayLike = ()) -> Rows:
        """Rows of tokens, uint8 [tokens * heads * row_bytes]; see `NgramHash.row_ids`. Raises as `lookup`."""
        return self.lookup(self.hash.row_ids(tokens, context))

    def refuse_if_changed(self) -> None:
        """Raises TableChanged once the watch has seen a change."""
        if self.watch.change is not None:
            raise TableChanged(f"{self.watch.change}: restart the daemon on the table that is meant")

    @property
    def faults(self) -> Int64Array:
        """The guard's count, for kernels; see `repaired`."""
        return self._guard.state[:1]

    def repair(self) -> None:
        """Bring the file's pages back where the guard has put zeros."""
        with self._repair_lock:
            faults = self._guard.faults
            if faults != self.repaired[0]:
                self._region.remap()
                self.repaired[0] = faults

    def keep_mapped(self) -> None:
        """Let `close` do nothing: a native thread still reads, and would die of a mapping that goes."""
        self._is_kept = True

    def close(self) -> None:
        """Unmap and close the files. No lookup may run."""
        if not self._is_kept:
            self.advisor.close()
            self._unmap()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _unmap(self) -> None:
        self._guard.release(self.first_address)
        self._region.close()

    def _lookup_decode(self, ids: Int64Array, out: Rows) -> None:
        advisor, faults = self.advisor, self._guard.faults
        whole = faults == self.repaired[0] and gather.advise_and_copy(
            ids, self.places, self.layout.row_bytes, advisor.code, advisor.pidfd, out.ctypes.data
        )
        self.counters.rows_advised.add(ids.size if advisor.code else 0)
        self._confirm(ids, out, whole, faults)

    def _lookup_bulk(self, ids: Int64Array, out: Rows) -> None:
        """Slices, in which decode steps are let in between."""
        advisor, row_bytes, ready = self.advisor, self.layout.row_bytes, gather.UNKNOWN
        target, decoding = out.ctypes.data, self.gate.active.ctypes.data
        self.marks.check(ids, self.places, row_bytes)
        for start in range(0, ids.size, SLICE_ROWS):
            piece = ids[start : start + SLICE_ROWS]
            faults = self._guard.faults
            whole = faults == self.repaired[0]
            if whole:
                ready, advised = gather.copy_slice(
                    ids[start : start + SLICE_ROWS + WINDOW_ROWS], piece.size, self.places, row_bytes,
                    advisor.code, advisor.pidfd, target + start * row_bytes, ready, decoding,
                )  # fmt: skip
                self.counters.rows_advised.add(advised)
                whole = gather.are_files_whole(piece, self.places)
            self._confirm(piece, out[start * row_bytes : (start + piece.size) * row_bytes], whole, faults)

    def _confirm(self, ids: Int64Array, out: Rows, whole: bool, faults_before: int) -> None:
        """Read again, exactly, what was copied in doubt: a short file, or a fault anywhere meanwhile."""
        if whole and self._guard.faults == faults_before:
            return
        index, number = gather.read(ids, self.places, self.layout.row_bytes, out.ctypes.data)
        self.repair()
        if index >= 0:
            self.counters.read_errors.add(1)
            self.watch.check()
            path = self.layout.segments[gather.segment_of(self.places, ids[index])].path
            reason = os.strerror(number) if number else "the file ends before it"
            raise RowsLost(f"{path}: row {ids[index]} cannot be read: {reason}")
