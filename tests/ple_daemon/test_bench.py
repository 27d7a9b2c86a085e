"""Cold rows are cold, figures are figures, and a bench that could not measure refuses."""

import mmap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from conftest import REAL_WIDTH

from ple_daemon.__main__ import main
from ple_daemon.bench import Bench, Effort
from ple_daemon.cold_rows import ColdRows, NotColdError
from ple_daemon.contest import Figure, take_turns
from ple_daemon.source import open_table, read_layout
from ple_daemon.table import Table

TINY = Effort(rounds=1, gather_rows=96, steps=2, prefetch_tokens=20)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return REAL_WIDTH.write(tmp_path / "own")


@pytest.fixture
def table(checkpoint: Path) -> Iterator[Table]:
    with open_table(checkpoint) as table:
        yield table


def test_drawn_rows_share_no_page_and_are_cold(table: Table, shared_rows: np.ndarray) -> None:
    cold = ColdRows([table])
    seen: set[int] = set()
    for count in (1, 200, 64):
        table.lookup(np.arange(0, table.layout.rows, 5))
        ids = cold.draw(count)
        assert len(set(ids.tolist())) == len(ids) == count
        assert count <= len(cold.pages) <= 2 * count
        assert not seen & set(cold.pages.tolist())
        seen |= set(cold.pages.tolist())
        assert cold.count_cached(cold.pages) == 0
        assert np.array_equal(table.lookup(ids), shared_rows[ids].reshape(-1))
        assert cold.count_cached(cold.pages) == len(cold.pages)


def test_every_page_of_a_draw_belongs_to_one_row(table: Table) -> None:
    cold = ColdRows([table])
    ids = cold.draw(300)
    first, last = cold._pages_of(ids)
    assert len(cold.pages) == len(ids) + int((first != last).sum())


def test_pages_set_aside_are_not_drawn(table: Table) -> None:
    cold = ColdRows([table])
    aside = cold.set_aside(np.arange(table.layout.rows // 2))
    assert not set(aside.tolist()) & set(cold.draw(300).tolist())
    assert cold.ids.min() >= table.layout.rows // 2


def test_running_out_of_pages_is_said(table: Table) -> None:
    cold = ColdRows([table])
    cold.draw(800)
    with pytest.raises(NotColdError, match="too few pages are left"):
        cold.draw(2000)


def test_pages_that_others_hold_are_noticed(table: Table) -> None:
    path = table.layout.segments[0].path
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as held:
        assert sum(held[:: mmap.PAGESIZE]) >= 0
        with pytest.raises(NotColdError, match="cannot be dropped from the page cache; stop what else"):
            ColdRows([table]).draw(300)


def test_figures_of_a_table(checkpoint: Path) -> None:
    bench = Bench(checkpoint, TINY)
    try:
        figures = list(bench.run())
    finally:
        bench.close()
    assert [figure.bar for figure in figures] == ["<= 1.1", ">= 2.5", ">= 0.55", ">= 2", "<= 2.5", ">= 0.8"]
    assert all(figure.value > 0 for figure in figures)
    # d07: the one figure that no other load on the machine can change.
    assert figures[0].is_met, figures[0]


def test_a_table_that_is_too_small_is_refused(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(checkpoint)]) == 1
    with pytest.raises(SystemExit, match="2"):
        main(["bench", str(checkpoint), "--rounds", "4"])
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert "use a table of at least 3.9 GiB" in lines[0]
    assert "a median needs 5 rounds or more" in lines[1]


def test_an_effort_counts_what_it_draws(checkpoint: Path) -> None:
    heads = read_layout(checkpoint).constants.heads
    bench = Bench(checkpoint, TINY)
    try:
        list(bench.run())
        assert int(bench._cold._used.sum()) <= TINY.pages(heads)
    finally:
        bench.close()


@pytest.mark.parametrize(
    ("value", "bar", "met"),
    [(2.5, ">= 2.5", True), (2.4, ">= 2.5", False), (1.2, "<= 1.1", False), (9.0, "-", True)],
)
def test_bars(value: float, bar: str, met: bool) -> None:
    figure = Figure("name", value, bar, "a 1 ms")
    assert figure.is_met is met
    assert ("MISSED" in str(figure)) is not met


def test_a_miss_never_looks_like_its_bar() -> None:
    assert " 0.548 " in str(Figure("name", 0.548, ">= 0.55", ""))
    assert " 0.55 " in str(Figure("name", 0.5512, ">= 0.55", ""))
    assert " 2.5004 " in str(Figure("name", 2.50041, "<= 2.5", ""))


def test_sides_take_turns() -> None:
    turns: list[str] = []
    taken = take_turns(
        {"a": lambda: turns.append("a"), "b": lambda: turns.append("b")}, 4, lambda: turns.append("-")
    )
    assert sorted(taken) == ["a", "b"]
    assert turns[::2] == ["-"] * 8
    assert all(sorted(turns[at : at + 4 : 2]) == ["a", "b"] for at in range(1, 16, 4))
