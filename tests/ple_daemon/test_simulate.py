"""Models of caches against slow oracles, traces in every format, and what a simulation says."""

import json
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ple_daemon.__main__ import main
from ple_daemon.cache_models import Interner, RowCache, replay
from ple_daemon.hash_constants import derive
from ple_daemon.ngram_hash import NgramHash
from ple_daemon.plot import plot_simulation
from ple_daemon.simulate import GIB, Replay, Shape, simulate
from ple_daemon.trace import Sequence, TraceError, read_trace, zipf_trace

SMALL = Shape(derive(vocab_size=64, eos_token_id=60, ngram_vocab_size_base=30), 320, 64)
PAGE = 4096


class Lru:
    def __init__(self, capacity: int) -> None:
        self.items: OrderedDict[int, None] = OrderedDict()
        self.capacity = capacity

    def touch(self, item: int) -> bool:
        hit = item in self.items
        self.items[item] = None
        self.items.move_to_end(item)
        if len(self.items) > self.capacity:
            self.items.popitem(last=False)
        return hit


def oracle(
    rows: list[list[int]], row_bytes: int, cache: RowCache, rows_kept: int, pages_kept: int, learnt: int
) -> list[int]:
    """Cold pages of each token, the slow way; rows are real row ids."""
    uses = Counter(row for token in rows[:learnt] for row in token)
    first_use = {row: at for at, row in reversed(list(enumerate(row for token in rows for row in token)))}
    hot = set(sorted(uses, key=lambda row: (-uses[row], first_use[row]))[:rows_kept])
    row_lru, page_lru = Lru(rows_kept), Lru(pages_kept)
    cold = []
    for token in rows:
        misses = 0
        for row in token:
            if cache is RowCache.STATIC and row in hot:
                continue
            if cache is RowCache.LRU and row_lru.touch(row):
                continue
            first, last = row * row_bytes // PAGE, ((row + 1) * row_bytes - 1) // PAGE
            misses += sum(not page_lru.touch(page) for page in range(first, last + 1))
        cold.append(misses)
    return cold


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 63), min_size=1, max_size=60),
    st.sampled_from(list(RowCache)),
    st.integers(0, 40),
    st.integers(0, 40),
    st.integers(0, 60),
)
def test_models_equal_their_oracles(
    tokens: list[int], cache: RowCache, rows_kept: int, pages_kept: int, learnt: int
) -> None:
    trace = [Sequence(np.array(tokens, np.int64), 0)]
    ids = NgramHash(SMALL.constants).row_ids(tokens).tolist()
    found = Replay(trace, SMALL).cold_pages(cache, rows_kept * 320, pages_kept * PAGE, learnt)
    assert found.tolist() == oracle(ids, 320, cache, rows_kept, pages_kept, learnt)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2**62), max_size=30), max_size=5))
def test_interned_keys_are_numbered_by_first_use(parts: list[list[int]]) -> None:
    interner, known = Interner(), {}
    for part in parts:
        numbers = interner.intern(np.array(part, np.int64))
        assert numbers.tolist() == [known.setdefault(key, len(known)) for key in part]
    assert interner.keys.tolist() == list(known)


def test_interning_more_than_the_first_size() -> None:
    interner = Interner()
    keys = np.random.default_rng(0).permutation(200_000) * 64
    assert np.array_equal(interner.intern(keys), np.arange(200_000))
    assert np.array_equal(interner.intern(keys[::-1].copy()), np.arange(200_000)[::-1])


def test_a_cache_of_everything_reads_each_page_once() -> None:
    rows = np.array([[0, 1, 2], [2, 1, 0], [0, 0, 0]], np.int32)
    pages = np.array([[0, 0], [0, 1], [1, 1]], np.int32)
    cold = np.zeros(3, np.uint8)
    replay(rows, pages, int(RowCache.NONE), 0, np.zeros(3, np.bool_), 100, cold)
    assert cold.tolist() == [2, 0, 0]


def test_requests_do_not_share_n_grams() -> None:
    """Each request starts as a sequence does: what came before it in the trace is not its context."""
    apart = Replay([Sequence(np.array([1, 2]), 1), Sequence(np.array([1, 2]), 1)], SMALL)
    assert np.array_equal(apart.rows[:2], apart.rows[2:])
    assert apart.is_prompt.tolist() == [True, False, True, False]


def test_simulation_by_kind() -> None:
    rng = np.random.default_rng(3)
    trace = [Sequence(rng.integers(0, 64, 50), 40) for _ in range(10)]
    found = simulate(trace, SMALL, [1e-5, 2e-5], 4 * PAGE / GIB, 0.5)
    assert [(o.kind, o.model, o.extra_gib) for o in found.outcomes[:4]] == [
        ("prefill", "page cache", 0.0), ("prefill", "more page cache", 1e-5),
        ("prefill", "LRU of rows", 1e-5), ("prefill", "static hot rows", 1e-5),
    ]  # fmt: skip
    assert {o.tokens for o in found.outcomes if o.kind == "decode"} == {50}
    assert {o.tokens for o in found.outcomes if o.kind == "prefill"} == {200}
    assert found.outcomes[0].saved == 0
    assert all(0 <= o.cold_steps <= 1 and o.saved <= 1 for o in found.outcomes)
    assert json.loads(found.as_json())["tokens"] == 500
    assert "static hot rows" in found.as_text()


def test_first_seen_rows() -> None:
    replay_ = Replay([Sequence(np.array([5, 5, 5, 5, 5, 5]), 0)], SMALL)
    assert replay_.first_seen(3) == 0
    assert replay_.first_seen(0) == replay_.row_count / replay_.rows.size


@pytest.mark.parametrize("name", ["ids.txt", "ids.npy", "ids.jsonl"])
def test_formats(name: str, tmp_path: Path) -> None:
    path, ids = tmp_path / name, [3, 1, 4, 1, 5]
    if name.endswith("npy"):
        np.save(path, np.array(ids, np.int32))
    elif name.endswith("jsonl"):
        path.write_text('{"prompt": [3, 1, 4], "output": [1, 5]}\n\n{"prompt": [3]}\n')
    else:
        path.write_text("3, 1\n4 1 5\n")
    trace = read_trace(path)
    assert trace[0].tokens.tolist() == ids
    assert [s.prompt_tokens for s in trace] == ([3, 1] if name.endswith("jsonl") else [0])


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.txt", b"hello", "not a text file of token ids"),
        ("a.txt", b"\xff\xfe", "not a text file of token ids"),
        ("a.txt", b"9999999999", "does not fit in 32 bits"),
        ("a.txt", b"", "holds no token"),
        ("a.npy", b"nonsense", "a.npy: "),
        ("a.npy", b"", "a.npy: "),
        ("a.jsonl", b'{"prompt": [1]}\n{"output": [1]}', r"line 2 is no request"),
        ("a.jsonl", b'{"prompt": [1.5]}', r"line 1 is no request"),
        ("a.jsonl", b'{"prompt": "text"}', r"line 1 is no request"),
        ("a.jsonl", b"[1, 2]", r"line 1 is no request"),
        ("a.jsonl", b"[" * 100_000, r"line 1 is no request"),
    ],
)  # fmt: skip
def test_bad_traces(name: str, content: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TraceError, match=reason):
        read_trace(tmp_path / name)


def test_a_synthetic_trace_is_seeded_and_repeats_n_grams() -> None:
    trace = zipf_trace(20_000, 64, seed=1)
    assert np.array_equal(trace[0].tokens, zipf_trace(20_000, 64, seed=1)[0].tokens)
    assert 0 <= trace[0].tokens.min() <= trace[0].tokens.max() < 64
    assert Replay(trace, SMALL).first_seen(10_000) < 0.5


def test_the_command(command: Callable, tmp_path: Path, shared_checkpoint: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(json.dumps({"prompt": list(range(400)), "output": [1, 2, 3] * 100}))
    done = command(
        "simulate", trace, "--checkpoint", shared_checkpoint, "--cache-gib", "0.0001", "0.0002",
        "--page-cache-gib", "0.001", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["tokens"], told["row_bytes"], len(told["outcomes"])) == (700, 320, 14)


def test_a_picture(tmp_path: Path) -> None:
    found = simulate(zipf_trace(500, 64), SMALL, [1e-5, 2e-5], 4 * PAGE / GIB, 0.5)
    plot_simulation(found, tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "give either a TRACE or --synthetic zipf"),
        (["none.txt", "--synthetic", "zipf"], "give either a TRACE or --synthetic zipf"),
        (["none.txt"], "none.txt: cannot be read: No such file or directory"),
        (["none.txt", "--checkpoint", "/none"], "/none/config.json: "),
    ],
)
def test_refusals_are_one_line(arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *arguments]) == 1
    error = capsys.readouterr().err
    assert error.startswith("ple-daemon: ")
    assert reason in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [["--tokens", "0"], ["--tokens", "9" * 15], ["--cache-gib", "1e300"], ["--page-cache-gib", "-1"]],
)
def test_impossible_sizes_are_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["simulate", "--synthetic", "zipf", *arguments])
    assert capsys.readouterr().err.startswith(f"ple-daemon: argument {arguments[0]}: {arguments[1]}")
