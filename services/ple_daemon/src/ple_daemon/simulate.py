"""Would keeping rows in RAM save cold reads? Replays a token trace, turned into rows by the table's own hash.

Compared, for the same extra memory, with the page cache as it is: a larger page cache, an LRU of single rows,
and a fixed set of the rows that were used most in the first part of the trace. Figures are of the rest.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from ple_daemon import cache_models
from ple_daemon.cache_models import Int32Array, Interner, RowCache
from ple_daemon.hash_constants import HashConstants, derive
from ple_daemon.ngram_hash import NgramHash
from ple_daemon.ple_config import read_config
from ple_daemon.region import PAGE_BYTES
from ple_daemon.trace import Sequence as TokenSequence

# The released checkpoint: 16 rows of 320 bytes a token.
RELEASED_VOCAB, RELEASED_EOS, RELEASED_ROW_BYTES = 248_320, 248_044, 320
GIB = 1024**3
_BF16_BYTES = 2


@dataclass(frozen=True, slots=True)
class Shape:
    """The table that a trace is turned into rows of."""

    constants: HashConstants
    row_bytes: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """One model's figures for one kind of token. `saved` is relative to the page cache as it is."""

    model: str
    extra_gib: float
    kind: str
    tokens: int
    cold_pages: int
    saved: float
    cold_steps: float


@dataclass(frozen=True, slots=True)
class Simulation:
    """What a trace touches, and how each model did."""

    tokens: int
    rows: int
    row_bytes: int
    pages: int
    page_cache_gib: float
    learnt_share: float
    first_seen: float
    outcomes: tuple[Outcome, ...]

    def as_text(self) -> str:
        lines = [
            f"{self.tokens:,} tokens touch {self.rows:,} rows = {self.rows * self.row_bytes / GIB:.2f} GiB",
            f"  as pages {self.pages * PAGE_BYTES / GIB:.2f} GiB",
            f"figures are of the last {1 - self.learnt_share:.0%} of the trace",
            f"  {self.first_seen:.1%} of its row reads are of rows never seen before",
            "",
            f"{'tokens':8} {'cache':34} {'cold pages':>12} {'saved':>7} {'steps with a cold read':>23}",
        ]
        for outcome in self.outcomes:
            name = f"page cache of {self.page_cache_gib:g} GiB"
            if outcome.extra_gib:
                name = f"  + {outcome.extra_gib:g} GiB {outcome.model}"
            figures = f"{outcome.cold_pages:>12,} {outcome.saved:>7.1%} {outcome.cold_steps:>23.3f}"
            lines.append(f"{outcome.kind:8} {name:34} {figures}")
        return "\n".join(lines)

    def as_json(self) -> str:
        return json.dumps(asdict(self), indent=1)


def released_shape() -> Shape:
    """Of the released checkpoint."""
    constants = derive(vocab_size=RELEASED_VOCAB, eos_token_id=RELEASED_EOS)
    return Shape(constants, RELEASED_ROW_BYTES, RELEASED_VOCAB)


def checkpoint_shape(folder: Path) -> Shape:
    """Of a checkpoint's config.json, with rows of bf16. Raises TableRefusedError."""
    config = read_config(folder / "config.json")
    return Shape(config.constants, config.row_elements * _BF16_BYTES, config.vocab_size)


class Replay:
    """A trace turned into dense row and page numbers, ready to be run against models."""

    def __init__(self, trace: Sequence[TokenSequence], shape: Shape) -> None:
        rows, pages = Interner(), Interner()
        ngrams = NgramHash(shape.constants)
        parts = [
            rows.intern(piece.reshape(-1))
            for sequence in tqdm(trace, desc="hash", leave=False)
            for piece in ngrams.pieces(sequence.tokens)
        ]
        self.rows: Int32Array = np.concatenate(parts).reshape(-1, shape.constants.heads)
        starts = rows.keys * shape.row_bytes
        first, last = starts // PAGE_BYTES, (starts + shape.row_bytes - 1) // PAGE_BYTES
        self.pages = pages.intern(np.stack([first, last], axis=1).reshape(-1)).reshape(-1, 2)
        self.row_bytes = shape.row_bytes
        self.row_count, self.page_count = rows.count, pages.count
        self.is_prompt = np.concatenate(
            [np.arange(len(sequence.tokens)) < sequence.prompt_tokens for sequence in trace]
        )

    def cold_pages(
        self, cache: RowCache, cache_bytes: int, page_cache_bytes: int, learnt_tokens: int
    ) -> npt.NDArray[np.uint8]:
        """Pages that each token reads from the drive, uint8 [tokens]."""
        row_capacity = cache_bytes // self.row_bytes
        chosen = np.zeros(self.row_count, np.bool_)
        if cache is RowCache.STATIC:
            chosen[self.hottest(row_capacity, learnt_tokens)] = True
        cold = np.zeros(len(self.rows), np.uint8)
        page_capacity = page_cache_bytes // PAGE_BYTES
        cache_models.replay(self.rows, self.pages, int(cache), row_capacity, chosen, page_capacity, cold)
        return cold

    def hottest(self, count: int, learnt_tokens: int) -> npt.NDArray[np.intp]:
        """The rows used most in the first `learnt_tokens` tokens, ties by first use; unused ones never."""
        uses = np.bincount(self.rows[:learnt_tokens].reshape(-1), minlength=self.row_count)
        order = np.argsort(-uses, kind="stable")[:count]
        used: npt.NDArray[np.intp] = order[uses[order] > 0]
        return used

    def first_seen(self, learnt_tokens: int) -> float:
        """Share of row reads after `learnt_tokens` that are the first of their row in the whole trace."""
        known = int(self.rows[:learnt_tokens].max(initial=-1)) + 1
        return (self.row_count - known) / max(1, self.rows[learnt_tokens:].size)


def simulate(
    trace: Sequence[TokenSequence],
    shape: Shape,
    extra_gib: Sequence[float],
    page_cache_gib: float,
    learnt_share: float,
) -> Simulation:
    """Replay `trace` against every model with every amount of extra memory."""
    replay = Replay(trace, shape)
    learnt_tokens = int(len(replay.rows) * learnt_share)
    outcomes = list(_outcomes(replay, extra_gib, page_cache_gib, learnt_tokens))
    return Simulation(
        tokens=len(replay.rows), rows=replay.row_count, row_bytes=shape.row_bytes, pages=replay.page_count,
        page_cache_gib=page_cache_gib, learnt_share=learnt_share, first_seen=replay.first_seen(learnt_tokens),
        outcomes=tuple(sorted(outcomes, key=lambda outcome: outcome.kind, reverse=True)),
    )  # fmt: skip


def _outcomes(
    replay: Replay, extra_gib: Sequence[float], page_cache_gib: float, learnt_tokens: int
) -> Iterator[Outcome]:
    base_bytes = int(page_cache_gib * GIB)
    runs = [("page cache", RowCache.NONE, 0.0)]
    for extra in extra_gib:
        runs += [
            ("more page cache", RowCache.NONE, extra),
            ("LRU of rows", RowCache.LRU, extra),
            ("static hot rows", RowCache.STATIC, extra),
        ]
    kinds = {"prefill": replay.is_prompt, "decode": ~replay.is_prompt}
    base: dict[str, int] = {}
    for model, cache, extra in tqdm(runs, desc="models", leave=False):
        extra_bytes = int(extra * GIB)
        page_bytes = base_bytes + (extra_bytes if cache is RowCache.NONE else 0)
        cold = replay.cold_pages(cache, extra_bytes, page_bytes, learnt_tokens)
        for kind, is_kind in kinds.items():
            counted = cold[learnt_tokens:][is_kind[learnt_tokens:]]
            if not len(counted):
                continue
            pages = int(counted.sum(dtype=np.int64))
            base.setdefault(kind, pages)
            yield Outcome(
                model=model, extra_gib=extra, kind=kind, tokens=len(counted), cold_pages=pages,
                saved=1 - pages / base[kind] if base[kind] else 0.0, cold_steps=float((counted > 0).mean()),
            )  # fmt: skip
