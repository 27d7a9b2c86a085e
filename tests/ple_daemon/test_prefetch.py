"""Prompts read ahead: what becomes resident, in which order, and how it stops."""

import itertools
import mmap
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from conftest import DEADLINE_S, REAL_WIDTH, eventually
from hypothesis import given, settings
from hypothesis import strategies as st

from ple_daemon import prefetch as prefetch_module
from ple_daemon import prefetch_hint
from ple_daemon.cold_rows import ColdRows
from ple_daemon.gather import Advice
from ple_daemon.page_windows import collect_windows
from ple_daemon.prefetch import Prefetcher
from ple_daemon.prefetch_hint import Hint
from ple_daemon.servicer import limits
from ple_daemon.shm_plane import ShmPlane
from ple_daemon.shm_region import MappedRegion
from ple_daemon.source import open_table, read_layout
from ple_daemon.table import Table
from ple_daemon.window_pace import MAX_ROWS, WindowPace
from ple_rpc.bell import ANSWER, RING
from ple_rpc.shared_region import RegionLayout, SharedRegion

PAGE = mmap.PAGESIZE
NO_CONTEXT = np.zeros(0, np.int64)


@pytest.fixture
def table(tmp_path: Path) -> Iterator[Table]:
    with open_table(REAL_WIDTH.write(tmp_path / "own")) as table:
        yield table


@pytest.fixture
def prefetcher(table: Table) -> Iterator[Prefetcher]:
    made = Prefetcher(table, max_queued=3)
    yield made
    if made._thread.is_alive():
        assert made.stop(10)


def tokens(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 500, count)


def mapped_bytes(table: Table) -> int:
    """Resident bytes of this process's mappings of the table's files."""
    paths = {str(segment.path) for segment in table.layout.segments}
    return sum(m.rss for m in psutil.Process().memory_maps(grouped=False) if m.path in paths)


def pages_of(table: Table, ids: np.ndarray) -> set[int]:
    pages = set()
    for row in ids.reshape(-1):
        segment = int(np.searchsorted(table.places[:, 0], row, side="right")) - 1
        start = table.places[segment, 1] + (row - table.places[segment, 0]) * table.layout.row_bytes
        pages.update(range(int(start) // PAGE, int(start + table.layout.row_bytes - 1) // PAGE + 1))
    return pages


@pytest.mark.parametrize("advice", list(Advice))
def test_rows_are_mapped_afterwards(advice: Advice, tmp_path: Path) -> None:
    prompt = tokens(40)
    with Table(read_layout(REAL_WIDTH.write(tmp_path / "own")), advice) as table:
        table._region.remap()  # forget what the fingerprint mapped
        assert mapped_bytes(table) == 0
        prefetcher = Prefetcher(table, 3)
        prefetcher.start()
        assert prefetcher.submit((b"", "a"), 0, prompt, NO_CONTEXT) == 40 * 16
        eventually(lambda: prefetcher.idle, "prefetch done")
        needed = pages_of(table, table.hash.row_ids(prompt))
        assert prefetcher.counters.pages.value >= len(needed)
        assert mapped_bytes(table) >= len(needed) * PAGE
        assert prefetcher.counters.rows.value == 40 * 16
        assert prefetcher.stop(10)


@settings(max_examples=30)
@given(st.lists(st.integers(0, REAL_WIDTH.rows - 1), max_size=200))
def test_windows_cover_every_page_and_repeat_none(shared_checkpoint: Path, ids: list[int]) -> None:
    with open_table(shared_checkpoint) as table:
        wanted = np.array(ids, np.int64)
        bitmap = np.zeros(table.page_bitmap_bytes, np.uint8)
        half = len(ids) // 2
        windows = np.concatenate(
            [
                collect_windows(part, table.places, table.layout.row_bytes, table.first_address, bitmap)
                for part in (wanted[:half], wanted[half:])
            ]
        )
        assert (windows[:, 0] % PAGE == 0).all()
        covered = {
            page for first, size, _ in windows for page in range(first // PAGE, (first + size) // PAGE)
        }
        assert covered == pages_of(table, wanted)
        assert len({tuple(window) for window in windows.tolist()}) == len(windows)
        # A second pass over the same rows finds nothing new.
        again = collect_windows(wanted, table.places, 320, table.first_address, bitmap)
        assert len(again) == 0


def test_context_leads_to_the_same_rows_as_the_lookup(
    table: Table, prefetcher: Prefetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts are hashed in pieces; the pieces' rows must be those of the whole."""
    prompt, context = tokens(5000), np.array([3, 4])
    seen = []

    def record(ids: np.ndarray, *arguments: object) -> np.ndarray:
        seen.append(ids.copy())
        return collect_windows(ids, *arguments)

    monkeypatch.setattr(prefetch_hint, "collect_windows", record)
    prefetcher.start()
    prefetcher.submit((b"", "a"), 0, prompt, context)
    eventually(lambda: prefetcher.idle, "prefetch done")
    assert len(seen) > 1
    assert np.array_equal(np.concatenate(seen), table.hash.row_ids(prompt, context).reshape(-1))


def test_full_queue_drops_hints(prefetcher: Prefetcher) -> None:
    for name in "abc":
        assert prefetcher.submit((b"", name), 0, tokens(1), NO_CONTEXT) == 16
    assert prefetcher.submit((b"", "d"), 0, tokens(1), NO_CONTEXT) is None
    assert prefetcher.submit((b"", "a"), 1, tokens(2), NO_CONTEXT) == 32
    assert (prefetcher.queued, prefetcher.counters.dropped.value) == (3, 1)


def test_epochs_decide_which_is_newest(prefetcher: Prefetcher) -> None:
    key = (b"", "a")
    assert prefetcher.submit(key, 5, tokens(1), NO_CONTEXT) is not None
    assert prefetcher.submit(key, 4, tokens(1), NO_CONTEXT) is None
    assert prefetcher.cancel(key, 4) is False
    assert prefetcher.queued == 1
    assert prefetcher.cancel(key, 5) is True
    assert prefetcher.cancel(key, 5) is False
    assert prefetcher.queued == 0
    assert prefetcher.cancel((b"", "never seen"), 0) is False


def test_a_decode_step_pauses_the_prefetch_and_cancel_ends_it(
    table: Table, prefetcher: Prefetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch_module, "_DECODE_PATIENCE_S", 60.0)
    key = (b"", "a")
    with table.gate:
        prefetcher.start()
        prefetcher.submit(key, 0, tokens(4000), NO_CONTEXT)
        eventually(lambda: prefetcher.queued == 0, "prefetch started")
        assert prefetcher.counters.pages.value == 0
        assert not prefetcher.idle
        assert prefetcher.cancel(key, 0) is True
    eventually(lambda: prefetcher.idle, "prefetch ended")
    assert prefetcher.counters.pages.value == 0
    assert prefetcher.counters.cancelled.value == 1


def test_stop_ends_a_running_prefetch(table: Table, prefetcher: Prefetcher) -> None:
    prefetcher.start()
    for name in "abc":
        prefetcher.submit((b"", name), 0, tokens(100_000, seed=ord(name)), NO_CONTEXT)
    assert prefetcher.stop(10) is True
    assert prefetcher.submit((b"", "d"), 0, tokens(1), NO_CONTEXT) is None
    assert threading.active_count() >= 1


def test_a_truncated_file_ends_the_prefetch_not_the_worker(table: Table, prefetcher: Prefetcher) -> None:
    segment = table.layout.segments[1]
    os.truncate(segment.path, segment.offset_bytes)
    prefetcher.start()
    prefetcher.submit((b"", "a"), 0, tokens(500), NO_CONTEXT)
    eventually(lambda: prefetcher.idle, "prefetch ended")
    assert prefetcher.counters.failures.value == 1
    assert prefetcher.submit((b"", "b"), 0, tokens(1), NO_CONTEXT) == 16
    eventually(lambda: prefetcher.idle, "next prefetch ended")


@settings(max_examples=20)
@given(st.lists(st.integers(1, 80), min_size=1, max_size=40), st.integers(1, 300))
def test_windows_of_changing_sizes_leave_nothing_out(
    shared_checkpoint: Path, sizes: list[int], count: int
) -> None:
    prompt, drawn = tokens(count), itertools.cycle(sizes)
    with open_table(shared_checkpoint) as table:
        made = {}
        for name, size in (("whole", lambda: 1 << 20), ("cut", lambda: next(drawn))):
            hint = Hint((b"", "a"), 0, prompt, NO_CONTEXT)
            made[name] = list(hint.windows(table, np.zeros(table.page_bitmap_bytes, np.uint8), size))
        for windows in made.values():
            assert sum(rows for _, rows in windows) == count * 16
        assert all(len(window) <= max(sizes) for window, _ in made["cut"])
        cut, whole = (np.concatenate([window for window, _ in made[name]]) for name in ("cut", "whole"))
        assert np.array_equal(cut, whole)


def test_a_slow_drive_gets_small_windows_and_a_fast_one_large_ones() -> None:
    pace = WindowPace()
    for reads_per_s, rows in ((100_000, 64), (20_000, 32), (10_000, 16), (500, 16), (90_000, 64)):
        for _ in range(10):
            pace.took(pace.rows, pace.rows / reads_per_s)
        assert pace.rows == rows, reads_per_s
    pace.took(pace.rows - 1, 1.0)  # the rest of a prompt
    assert pace.rows == 64


def test_prompts_take_turns(prefetcher: Prefetcher, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short prompt that comes second is finished while a long one is still being read."""
    finished = []
    end = prefetcher._end

    def record(turn: object) -> None:
        finished.append(turn.hint.key[1])
        end(turn)

    monkeypatch.setattr(prefetcher, "_end", record)
    monkeypatch.setattr(prefetcher.pace, "rows", 8)
    prefetcher.submit((b"", "long"), 0, tokens(3000, seed=1), NO_CONTEXT)
    prefetcher.submit((b"", "short"), 0, tokens(20, seed=2), NO_CONTEXT)
    prefetcher.start()
    assert prefetcher.wait_idle(30)
    assert finished == ["short", "long"]


def test_at_most_so_many_are_read_at_once(table: Table) -> None:
    prefetcher = Prefetcher(table, 10)
    with table.gate:
        prefetcher.start()
        for name in "abcdef":
            prefetcher.submit((b"", name), 0, tokens(50, seed=ord(name)), NO_CONTEXT)
        eventually(lambda: prefetcher.active == prefetch_module.MAX_ACTIVE, "some are read")
        assert prefetcher.queued == 2
    assert prefetcher.wait_idle(30)
    assert prefetcher.counters.rows.value == 6 * 50 * 16
    assert prefetcher.stop(10)


def test_sessions_have_a_share_of_the_queue(table: Table) -> None:
    prefetcher = Prefetcher(table, 10, max_per_session=2)
    one, other = b"1" * 16, b"2" * 16
    assert [prefetcher.submit((one, name), 0, tokens(1), NO_CONTEXT) for name in "abc"] == [16, 16, None]
    assert prefetcher.submit((one, "a"), 1, tokens(2), NO_CONTEXT) == 32
    assert prefetcher.submit((other, "a"), 0, tokens(1), NO_CONTEXT) == 16
    for name in "defg":
        assert prefetcher.submit((b"", name), 0, tokens(1), NO_CONTEXT) == 16


def test_the_end_of_a_session_drops_its_prompts(table: Table) -> None:
    prefetcher = Prefetcher(table, 10)
    one, other = b"1" * 16, b"2" * 16
    with table.gate:
        prefetcher.start()
        for name in "abcdef":
            prefetcher.submit((one, name), 0, tokens(500, seed=ord(name)), NO_CONTEXT)
        eventually(lambda: prefetcher.active == prefetch_module.MAX_ACTIVE, "some are read")
        prefetcher.submit((other, "a"), 0, tokens(10), NO_CONTEXT)
        assert prefetcher.cancel_session(one) == 6
        assert prefetcher.cancel_session(one) == 0
        assert prefetcher.queued == 1
    assert prefetcher.wait_idle(30)
    assert prefetcher.counters.rows.value == 10 * 16
    assert prefetcher.counters.cancelled.value == 6
    assert prefetcher.stop(10)


def test_a_prompt_is_not_read_further_ahead_than_memory_allows(
    table: Table, prefetcher: Prefetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch_module, "available_bytes", lambda: 2 * 200 * PAGE)
    prefetcher.submit((b"", "a"), 0, tokens(100), NO_CONTEXT)
    prefetcher.start()
    eventually(lambda: prefetcher.counters.pages.value >= 200, "read as far as allowed")
    assert not prefetcher.wait_idle(0.3)
    assert 200 <= prefetcher.counters.pages.value < 200 + 3 * MAX_ROWS
    for start in range(0, 4000, 500):  # the user moves, and so does the prefetch
        table.lookup(np.arange(start, start + 500))
    assert prefetcher.wait_idle(30)
    assert prefetcher.counters.rows.value == 100 * 16


def test_a_prompt_that_nobody_uses_is_given_up(
    prefetcher: Prefetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch_module, "available_bytes", lambda: 0)
    monkeypatch.setattr(prefetch_module, "_PARKED_LIMIT_S", 0.1)
    prefetcher.submit((b"", "a"), 0, tokens(400), NO_CONTEXT)
    prefetcher.start()
    assert prefetcher.wait_idle(30)
    assert prefetcher.counters.parked.value == 1
    assert prefetcher.counters.rows.value < 400 * 16


@pytest.fixture
def native_lookup(table: Table) -> Iterator[Callable[[np.ndarray], bytes]]:
    """Lookups through the shared-memory plane, in this process."""
    plane = ShmPlane(table)
    plane.start()
    region = SharedRegion(RegionLayout(4, 8192, table.layout.row_bytes), table.fingerprint)
    mapped = MappedRegion(region.fd, limits(table.layout, 1), table.layout.row_bytes, table.fingerprint)
    bell, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    bell.settimeout(DEADLINE_S)
    plane.seat(mapped, far)
    sequence = itertools.count(1)

    def lookup(ids: np.ndarray) -> bytes:
        region.ids(0, ids.size)[:] = ids.tobytes()
        number = next(sequence)
        bell.send(RING.pack(0, ids.size, number))
        assert ANSWER.unpack(bell.recv(64)) == (0, 0, number)
        return bytes(region.rows(0, ids.size))

    yield lookup
    assert plane.stop(10)
    bell.close()
    region.close()


@pytest.mark.parametrize("plane", ["lookup", "native_lookup"])
def test_rows_that_went_cold_again_are_counted(
    plane: str, table: Table, prefetcher: Prefetcher, request: pytest.FixtureRequest, shared_rows: np.ndarray
) -> None:
    look_up = table.lookup if plane == "lookup" else request.getfixturevalue(plane)
    prompt = tokens(200)
    rows = table.hash.row_ids(prompt).reshape(-1)
    cold = ColdRows([table])
    prefetcher.start()
    for evict in (False, True):
        before = table.marks.checked.value, table.marks.cold.value
        prefetcher.submit((b"", "a"), 0, prompt, NO_CONTEXT)
        assert prefetcher.wait_idle(30)
        cold.pages = cold.set_aside(rows)
        if evict:
            cold.evict()
        assert bytes(look_up(rows)) == shared_rows[rows].tobytes()
        checked = table.marks.checked.value - before[0]
        assert checked > 20
        found = table.marks.cold.value - before[1]
        # The native plane looks slice by slice: a page may be warm by a row of an earlier one.
        assert 0.8 * checked <= found <= checked if evict else found == 0
        look_up(rows)
        assert table.marks.checked.value - before[0] == checked


def test_the_time_of_a_prefetch_is_observed(table: Table) -> None:
    seen: list[float] = []
    prefetcher = Prefetcher(table, 3, observe=seen.append)
    prefetcher.start()
    prefetcher.submit((b"", "a"), 0, tokens(20), NO_CONTEXT)
    assert prefetcher.wait_idle(30)
    assert len(seen) == 1
    assert 0 < seen[0] < 30
    assert prefetcher.stop(10)
