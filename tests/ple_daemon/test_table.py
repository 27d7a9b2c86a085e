"""Rows out of open tables: any segments, any ids, any advice, and files that fail underneath."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from conftest import REAL_WIDTH
from hypothesis import given, settings
from hypothesis import strategies as st
from ple_checkpoint import Checkpoint

from ple_daemon.build import build
from ple_daemon.gather import Advice
from ple_daemon.hash_constants import derive
from ple_daemon.source import open_table, read_layout
from ple_daemon.table import Table
from ple_daemon.table_format import RowType, Segment, TableLayout
from ple_rpc.errors import BadRow, RowsLost, TableChanged

CONSTANTS = derive(vocab_size=512, eos_token_id=500, ngram_vocab_size_base=2)


def boundary_rows(layout: TableLayout) -> list[int]:
    ends = np.cumsum([segment.rows for segment in layout.segments])
    return sorted({0, *(int(end) - 1 for end in ends), *(int(end) for end in ends[:-1])})


@pytest.mark.parametrize("advice", list(Advice))
@pytest.mark.parametrize("count", [0, 1, 16, 64, 65, 256, 257, 5000])
def test_random_rows(advice: Advice, count: int, shared_checkpoint: Path, shared_rows: np.ndarray) -> None:
    ids = np.random.default_rng(count).integers(0, len(shared_rows), count)
    with Table(read_layout(shared_checkpoint), advice) as table:
        assert np.array_equal(table.lookup(ids).reshape(count, 320), shared_rows[ids])


def test_d04_every_boundary_row(shared_checkpoint: Path, shared_rows: np.ndarray) -> None:
    with open_table(shared_checkpoint) as table:
        ids = boundary_rows(table.layout)
        assert ids[0] == 0
        assert ids[-1] == len(shared_rows) - 1
        for row in ids:
            assert np.array_equal(table.lookup([row]), shared_rows[row])


def test_rows_land_in_the_callers_buffer(shared_checkpoint: Path, shared_rows: np.ndarray) -> None:
    out = np.zeros(3 * 320, np.uint8)
    with open_table(shared_checkpoint) as table:
        assert table.lookup([9, 8, 9], out) is out
    assert np.array_equal(out.reshape(3, -1), shared_rows[[9, 8, 9]])


@pytest.mark.parametrize("bad", [-1, REAL_WIDTH.rows, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("others", [0, 100])
def test_d04_rows_outside_the_table_are_refused(bad: int, others: int, shared_checkpoint: Path) -> None:
    with open_table(shared_checkpoint) as table, pytest.raises(BadRow, match=str(bad)):
        table.lookup([0] * others + [bad])


segment_sizes = st.lists(
    st.tuples(st.integers(1, 300), st.integers(0, 5000)), min_size=1, max_size=6
)  # rows, bytes of other content before them


@settings(max_examples=25)
@given(segment_sizes, st.sampled_from([1, 3, 20, 160, 1000, 5000]), st.integers(0, 2**32 - 1))
def test_segments_of_any_size_and_alignment(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[tuple[int, int]], width: int, seed: int
) -> None:
    folder = tmp_path_factory.mktemp("segments")
    rng = np.random.default_rng(seed)
    rows = sum(count for count, _ in sizes)
    expected = rng.integers(0, 256, (rows, width), np.uint8)
    segments, first = [], 0
    for index, (count, gap) in enumerate(sizes):
        path = folder / f"{index}.bin"
        path.write_bytes(bytes(gap) + expected[first : first + count].tobytes() + bytes(gap % 7))
        segments.append(Segment(path, gap, count))
        first += count
    layout = TableLayout(RowType.FP8_E4M3, width, rows, b"\x51\x39", CONSTANTS, tuple(segments))
    with Table(layout) as table:
        for ids in (np.array(boundary_rows(layout)), rng.permutation(rows), rng.integers(0, rows, 64)):
            assert np.array_equal(table.lookup(ids).reshape(len(ids), -1), expected[ids])


def test_tokens_are_hashed_and_looked_up(shared_checkpoint: Path, shared_rows: np.ndarray) -> None:
    with open_table(shared_checkpoint) as table:
        ids = table.hash.row_ids([5, 7, 500, 9], [3, 4]).reshape(-1)
        found = table.lookup_tokens([5, 7, 500, 9], [3, 4]).reshape(len(ids), -1)
    assert np.array_equal(found, shared_rows[ids])


def test_fingerprint_does_not_see_the_layout(tmp_path: Path) -> None:
    prints = set()
    for shards, files in ((1, 1), (4, 3), (12, 1)):
        with open_table(Checkpoint(shards=shards, files=files).write(tmp_path / f"{shards}")) as table:
            prints.add(table.fingerprint)
    build(tmp_path / "4", tmp_path / "flat.ple")
    with open_table(tmp_path / "flat.ple") as table:
        prints.add(table.fingerprint)
    assert len(prints) == 1


@pytest.mark.parametrize(
    "other",
    [Checkpoint(seed=8), Checkpoint(dtype="F8_E4M3"), Checkpoint(width=12), Checkpoint(base=220)],
    ids=["content", "row type", "width", "rows"],
)
def test_fingerprint_sees_the_content(other: Checkpoint, tmp_path: Path) -> None:
    with (
        open_table(Checkpoint().write(tmp_path / "one")) as one,
        open_table(other.write(tmp_path / "two")) as two,
    ):
        assert one.fingerprint != two.fingerprint


def own_table(tmp_path: Path) -> tuple[Table, Segment, int]:
    """A table that may be damaged, its second segment and that segment's first row."""
    table = open_table(REAL_WIDTH.write(tmp_path / "own"))
    first, second = table.layout.segments[:2]
    return table, second, first.rows


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("count", [1, 300])
def test_truncated_file_is_data_loss_and_nothing_worse(
    tmp_path: Path, shared_rows: np.ndarray, warm: bool, count: int
) -> None:
    table, segment, first = own_table(tmp_path)
    with table:
        lost = np.arange(first + 100, first + 100 + count)
        if warm:
            table.lookup(lost)
        os.truncate(segment.path, segment.offset_bytes + 50 * 320)
        kept = [0, first - 1, first, first + 49]
        assert np.array_equal(table.lookup(kept).reshape(4, -1), shared_rows[kept])
        with pytest.raises(RowsLost, match=rf"{segment.path}: row {first + 100} .* ends before it"):
            table.lookup(lost)
        with pytest.raises(TableChanged, match="size"):
            table.lookup(kept)


def test_zeros_behind_the_end_in_the_last_page_are_not_rows(tmp_path: Path) -> None:
    table, segment, first = own_table(tmp_path)
    with table:
        table.lookup([first + 3])
        # Inside the same page: the mapping reads zeros there and the kernel raises no signal.
        os.truncate(segment.path, segment.offset_bytes + 3 * 320 + 7)
        with pytest.raises(RowsLost):
            table.lookup([first + 3])


def test_pages_come_back_after_a_caught_fault(tmp_path: Path, shared_rows: np.ndarray) -> None:
    table, segment, first = own_table(tmp_path)
    whole = segment.path.read_bytes()
    with table:
        os.truncate(segment.path, segment.offset_bytes)
        table.watch.check = lambda: None  # as for a bad sector, where the files look unchanged
        with pytest.raises(RowsLost):
            table.lookup([first])
        with segment.path.open("r+b") as file:
            file.write(whole)
        assert np.array_equal(table.lookup([first]), shared_rows[first])


def test_lookups_survive_truncation_at_any_moment(tmp_path: Path, shared_rows: np.ndarray) -> None:
    table, segment, first = own_table(tmp_path)
    wrong, done = [], threading.Event()

    def hammer(seed: int) -> None:
        rng = np.random.default_rng(seed)
        while not done.is_set():
            ids = rng.integers(first, first + segment.rows, 300 if seed % 2 else 16)
            try:
                found = table.lookup(ids).reshape(len(ids), -1)
            except RowsLost:
                continue
            except TableChanged:
                return
            if not np.array_equal(found, shared_rows[ids]):
                wrong.append(ids)

    with table:
        threads = [threading.Thread(target=hammer, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for part in range(20, 0, -1):
            os.truncate(segment.path, segment.offset_bytes + segment.rows * 320 * part // 21)
        for thread in threads:
            thread.join(30)
        done.set()
        assert not any(thread.is_alive() for thread in threads)
        assert table.counters.read_errors.value >= 1
    assert not wrong


@pytest.mark.parametrize("what", ["inode", "size", "mtime", "gone"])
def test_a_changed_file_is_noticed(tmp_path: Path, what: str) -> None:
    table, segment, _ = own_table(tmp_path)
    with table:
        assert table.watch.check() is None
        if what == "inode":
            copy = segment.path.with_suffix(".copy")
            copy.write_bytes(segment.path.read_bytes())
            copy.rename(segment.path)
        elif what == "size":
            with segment.path.open("ab") as file:
                file.write(b"x")
        elif what == "mtime":
            os.utime(segment.path, (1, 1))
        else:
            segment.path.unlink()
        change = table.watch.check()
        assert change is not None
        assert what in change
        with pytest.raises(TableChanged, match=what):
            table.lookup([0])


def test_faults_outside_the_table_stay_fatal(tmp_path: Path) -> None:
    program = """
import mmap, os, sys
from ple_daemon.sigbus import guard
guard()
with open(sys.argv[1], "w+b") as file:
    file.truncate(4096)
    mapped = mmap.mmap(file.fileno(), 4096)
    os.ftruncate(file.fileno(), 0)
    mapped[0]
"""
    done = subprocess.run([sys.executable, "-c", program, tmp_path / "file"], check=False, timeout=60)
    assert done.returncode == -7
