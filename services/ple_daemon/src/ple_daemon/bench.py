"""What the daemon's ways of reading gain on a user's own table and drive, as ratios within one run.

Both sides of a ratio take turns in random order, and figures are medians. Every read is of rows that this run
has not touched before, dropped from the page cache and checked with mincore. The table is only read.
"""

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from ple_daemon.cold_rows import ColdRows, NotColdError
from ple_daemon.contest import Figure, ratio, take_turns
from ple_daemon.drive_reads import MAX_DEPTH, DirectFile
from ple_daemon.gather import Advice, Int64Array
from ple_daemon.page_windows import collect_windows, populate_windows, read_windows
from ple_daemon.prefetch import Prefetcher
from ple_daemon.region import PAGE_BYTES
from ple_daemon.source import read_layout
from ple_daemon.table import Table

MIN_ROUNDS = 5
DECODE_ROWS = 16
# Under a prefetch, decode lookups come one by one with a pause in between, as the steps of an engine do.
_STEP_PAUSE_S = 0.005
_PREFETCH_WAIT_S = 120.0
_UNTHROTTLED_ROWS = 1024
# What one round of everything draws, so that a table that is too small is refused before the first figure.
_SHARE_OF_TABLE = 0.6


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is read: turns of each side, rows of a bulk gather, lookups a turn, tokens of a prompt."""

    rounds: int = 5
    gather_rows: int = 8_192
    steps: int = 50
    prefetch_tokens: int = 2_500

    def pages(self, heads: int) -> int:
        """Distinct pages that the run draws, roughly."""
        gathers = (3 * self.rounds + 1) * self.gather_rows
        steps = 7 * self.rounds * self.steps * DECODE_ROWS
        return int(1.1 * (gathers + steps + 2 * self.rounds * self.prefetch_tokens * heads))


@dataclass(frozen=True, slots=True)
class Race:
    """A prompt read ahead and decode lookups at the same time: pages per second, median seconds a lookup."""

    pages_per_s: float
    lookup_s: float


class Bench:
    """One run on one table, which is opened twice: advised as it would be served, and plain."""

    def __init__(self, path: Path, effort: Effort) -> None:
        """Raises DaemonError when nothing cold can be measured on this table."""
        self._effort = effort
        layout = read_layout(path)
        needed = effort.pages(layout.constants.heads)
        pages = layout.size_bytes // PAGE_BYTES
        if needed > pages * _SHARE_OF_TABLE:
            raise NotColdError(
                f"{path}: {pages:,} pages, of which a run may read {int(pages * _SHARE_OF_TABLE):,}; "
                f"{effort.rounds} rounds read about {needed:,}, all different; use a table of at least "
                f"{needed / _SHARE_OF_TABLE * PAGE_BYTES / 2**30:.1f} GiB"
            )
        self._table, self._plain = Table(layout), Table(layout, Advice.NONE)
        self._cold = ColdRows([self._table, self._plain])
        self._largest = max(layout.segments, key=lambda segment: segment.rows).path

    def run(self) -> Iterator[Figure]:
        """Figures as they are measured."""
        yield self.bytes_per_page()
        yield from self.gathers()
        yield self.decode()
        yield from self.under_prefetch()

    def close(self) -> None:
        self._table.close()
        self._plain.close()

    def bytes_per_page(self) -> Figure:
        before_bytes = _read_bytes()
        pages = 0
        for _ in range(3):
            self._table.lookup(self._cold.draw(self._effort.gather_rows // 3))
            pages += len(self._cold.pages)
        moved_bytes = _read_bytes() - before_bytes
        sides = f"{moved_bytes:,} bytes for {pages:,} pages"
        return Figure(
            "disk bytes read / bytes of pages needed", moved_bytes / (pages * PAGE_BYTES), "<= 1.1", sides
        )

    def gathers(self) -> Iterator[Figure]:
        rows, rng = self._effort.gather_rows, np.random.default_rng()
        with DirectFile(self._largest) as file:
            offsets: list[Int64Array] = [file.random_offsets(rng, 0)]

            def prepare() -> None:
                self._cold.draw(rows)
                offsets[0] = file.random_offsets(rng, len(self._cold.pages))

            taken = take_turns(
                {
                    "plain": lambda: self._plain.lookup(self._cold.ids),
                    "advised": lambda: self._table.lookup(self._cold.ids),
                    "O_DIRECT": lambda: file.read(offsets[0], MAX_DEPTH),
                },
                self._effort.rounds, prepare,
            )  # fmt: skip
        advised = "advised", taken["advised"]
        yield ratio(
            f"cold gather of {rows:,} rows, plain / advised", ("plain", taken["plain"]), advised, ">= 2.5"
        )
        yield ratio(
            f"pages/s of an advised gather / of O_DIRECT reads, depth {MAX_DEPTH}",
            ("O_DIRECT", taken["O_DIRECT"]), advised, ">= 0.55",
        )  # fmt: skip

    def decode(self) -> Figure:
        plain: list[float] = []
        advised: list[float] = []
        for _ in range(self._effort.rounds):
            for table, times in ((self._plain, plain), (self._table, advised)):
                steps = self._cold.draw(self._effort.steps * DECODE_ROWS).reshape(-1, DECODE_ROWS)
                times.append(statistics.median(_timed(table, ids) for ids in steps))
        return ratio(
            f"cold lookup of {DECODE_ROWS} rows, p50 plain / advised",
            ("plain", statistics.median(plain)), ("advised", statistics.median(advised)), ">= 2",
        )  # fmt: skip

    def under_prefetch(self) -> Iterator[Figure]:
        """Decode lookups while a prompt is read ahead, and what it costs the prompt to give way to them."""
        idle: list[float] = []
        throttled: list[Race] = []
        unthrottled: list[Race] = []
        prefetcher = Prefetcher(self._table, 1)
        prefetcher.start()
        try:
            for _ in range(self._effort.rounds):
                idle.append(self._idle_steps())
                throttled.append(self._race(lambda tokens: _prefetch(prefetcher, tokens)))
                unthrottled.append(self._race(self._unthrottled))
        finally:
            prefetcher.stop(_PREFETCH_WAIT_S)
        busy_s = statistics.median(race.lookup_s for race in throttled)
        yield ratio(
            f"cold lookup of {DECODE_ROWS} rows, p50 while a prompt is prefetched / idle",
            ("prefetching", busy_s), ("idle", statistics.median(idle)), "<= 2.5",
        )  # fmt: skip
        rates = [statistics.median(race.pages_per_s for race in races) for races in (throttled, unthrottled)]
        sides = f"throttled {rates[0]:,.0f} pages/s, unthrottled {rates[1]:,.0f} pages/s"
        yield Figure("prefetch rate, throttled / unthrottled", rates[0] / rates[1], ">= 0.8", sides)

    def _idle_steps(self) -> float:
        steps = self._cold.draw(self._effort.steps * DECODE_ROWS).reshape(-1, DECODE_ROWS)
        return statistics.median(_steps(self._table, steps, lambda: False))

    def _race(self, read: Callable[[npt.NDArray[np.int64]], object]) -> Race:
        """`read` a prompt while decode lookups go on, on other pages."""
        constants = self._table.layout.constants
        tokens = np.random.default_rng().integers(0, 2**17, self._effort.prefetch_tokens)
        tokens[tokens == constants.eos_token_id] += 1
        pages = self._cold.set_aside(self._table.hash.row_ids(tokens).reshape(-1))
        steps = self._cold.draw(2 * self._effort.steps * DECODE_ROWS).reshape(-1, DECODE_ROWS)
        done, taken_s = threading.Event(), [0.0]

        def work() -> None:
            start_s = time.perf_counter()
            read(tokens)
            taken_s[0] = time.perf_counter() - start_s
            done.set()

        worker = threading.Thread(target=work, name="bench-prefetch")
        worker.start()
        try:
            times = _steps(self._table, steps, done.is_set)
        finally:
            worker.join(_PREFETCH_WAIT_S)
        return Race(len(pages) / taken_s[0], statistics.median(times))

    def _unthrottled(self, tokens: npt.NDArray[np.int64]) -> None:
        """The same pages in large windows that wait for nobody."""
        table = self._table
        bitmap = np.zeros(table.page_bitmap_bytes, np.uint8)
        for rows in table.hash.pieces(tokens):
            windows = collect_windows(
                rows.reshape(-1), table.places, table.layout.row_bytes, table.first_address, bitmap
            )
            before = windows[:0]
            for start in range(0, len(windows) + _UNTHROTTLED_ROWS, _UNTHROTTLED_ROWS):
                window = windows[start : start + _UNTHROTTLED_ROWS]
                read_windows(window, table.places, table.advisor.code, table.advisor.pidfd)
                populate_windows(before)
                before = window


def measure(path: Path, effort: Effort) -> Iterator[Figure]:
    """Figures of the table at `path` as they come. Raises DaemonError."""
    bench = Bench(path, effort)
    try:
        yield from tqdm(bench.run(), total=6, desc="figures", leave=False)
    finally:
        bench.close()


def _prefetch(prefetcher: Prefetcher, tokens: npt.NDArray[np.int64]) -> None:
    prefetcher.submit((b"", "bench"), 0, tokens, tokens[:0])
    if not prefetcher.wait_idle(_PREFETCH_WAIT_S):
        raise NotColdError(f"a prefetch of {len(tokens)} tokens took more than {_PREFETCH_WAIT_S:.0f} s")


def _steps(table: Table, steps: Int64Array, is_over: Callable[[], bool]) -> list[float]:
    """Seconds of each lookup, at least one, until `is_over`."""
    times: list[float] = []
    for ids in steps:
        if times and is_over():
            break
        times.append(_timed(table, ids))
        time.sleep(_STEP_PAUSE_S)
    return times


def _timed(table: Table, ids: Int64Array) -> float:
    start_s = time.perf_counter()
    table.lookup(ids)
    return time.perf_counter() - start_s


def _read_bytes() -> int:
    """Bytes that this process had the drive read."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    return 0
