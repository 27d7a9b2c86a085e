"""Logits, greedy tokens, prefix-cache hits, kills and a soak in one engine, every delivered row compared."""

from __future__ import annotations

import random
import signal
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import engine
import numpy as np
from compare import gap_where_parting
from engine import Daemon
from generate import VOCABULARY, Found, block_size, greedy, prompts, random_prompts, sampling, stream

TOP = 5


def run(settings: dict[str, Any]) -> Found:
    model = Path(settings["model"])
    with engine.daemon(model) as daemon:
        residency = TableResidency(model)
        with engine.running_engine(
            model, daemon.address, settings["pp"], max_num_batched_tokens=settings["max_num_batched_tokens"]
        ) as llm:
            pages_read = residency.pages_read()
            return {"table_pages_read_by_loading": pages_read} | _ask(llm, daemon, settings)


def _ask(llm: Any, daemon: Daemon, settings: dict[str, Any]) -> Found:
    rows = random_prompts(settings["lengths"])
    found: Found = {"block_size": block_size(llm)}
    if settings.get("kills"):
        # A check waits for the rows; without one only the forward does, in a graph.
        found["kills_unchecked"] = survive_kills(llm, daemon, rows[0])
    llm.collective_rpc("check_rows", args=(settings["model"],))
    found["prompt"] = [prompt_logits(llm, row) for row in rows]
    found["alone"] = [greedy(llm, [row], 24)[0] for row in rows]
    found["again"] = [greedy(llm, [row], 24)[0] for row in rows]
    found["together"] = greedy(llm, rows[:4], 24)
    if settings.get("kills"):
        found["kills"] = survive_kills(llm, daemon, rows[0])
    if settings.get("soak"):
        found["soak"] = _soak(llm, settings["soak"], found["block_size"])
    found["rows_checked"] = [result for result in llm.collective_rpc("rows_checked") if result is not None]
    found["owners"] = llm.collective_rpc("owns_table")
    found["table"] = [stats for stats in llm.collective_rpc("table_stats") if stats is not None]
    found["memory_gib"] = llm.collective_rpc("memory")
    return found


class TableResidency:
    """How much of the table's files comes into the page cache while something else is going on."""

    def __init__(self, model: Path) -> None:
        from ple_daemon.cold_rows import ColdRows
        from ple_daemon.region import PAGE_BYTES
        from ple_daemon.source import open_table

        self._table = open_table(model)
        self._cold = ColdRows([self._table])
        self._cold.evict()
        self._pages = np.arange(self._table.size_bytes // PAGE_BYTES)
        self._before = self._cold.count_cached(self._pages)

    def pages_read(self) -> str:
        read = self._cold.count_cached(self._pages) - self._before
        self._table.close()
        return f"{read} of {len(self._pages)}"


def prompt_logits(llm: Any, row: list[int]) -> list[Found]:
    """For each next token of a prompt: the best few, and the log-probability of the one that comes."""
    (answer,) = llm.generate(prompts([row]), sampling(1, prompt_logprobs=TOP), use_tqdm=False)
    positions = []
    for token, candidates in zip(row[1:], answer.prompt_logprobs[1:], strict=True):
        best = sorted(candidates.items(), key=lambda item: item[1].rank)[:TOP]
        positions.append(
            {
                "top": [candidate for candidate, _ in best],
                "top_logprobs": [value.logprob for _, value in best],
                "actual": candidates[token].logprob,
            }
        )
    return positions


def survive_kills(llm: Any, daemon: Daemon, row: list[int]) -> Found:
    """One stream of greedy tokens while the daemon dies five times and hangs once."""
    count = 420
    first = stream(llm, row, count)
    second = stream(llm, row, count)

    def kill() -> None:
        daemon.signal(signal.SIGKILL)
        daemon.start()

    def hang() -> None:
        daemon.signal(signal.SIGSTOP)
        threading.Timer(3.0, daemon.signal, (signal.SIGCONT,)).start()

    at = dict.fromkeys((50, 120, 190, 260, 330), kill) | {390: hang}
    disturbed = stream(llm, row, count, at)
    return {
        "undisturbed_equal": first["tokens"] == second["tokens"],
        "disturbed_equal": disturbed["tokens"] == first["tokens"],
        "distinct": len(set(first["tokens"])),
        "longest_step_s": max(disturbed["steps_s"]),
    }


def _soak(llm: Any, turns: int, block: int) -> Found:
    """Growing conversations on eight streams, lengths around block boundaries; then the last turns cold."""
    rng = random.Random(11)
    chats = [[rng.randrange(1000, VOCABULARY) for _ in range(max(8, block - 4) + 2 * n)] for n in range(8)]
    suspicious, turn_tokens = [], []
    for _ in range(turns):
        answered = greedy(llm, chats, 32)
        for number, answer in enumerate(answered):
            if _is_suspicious(answer["tokens"]):
                suspicious.append(
                    {"stream": number, "length": len(chats[number]), "tokens": answer["tokens"]}
                )
        turn_tokens.append([answer["cached"] for answer in answered])
        last = [list(chat) for chat in chats]
        for number, answer in enumerate(answered):
            chats[number] += answer["tokens"] + [
                rng.randrange(1000, VOCABULARY) for _ in range(1 + number % 5)
            ]
    hot = answered
    llm.reset_prefix_cache()
    cold = greedy(llm, last, 32)
    differing = [gap_where_parting(a, b) for a, b in zip(hot, cold, strict=True)]
    return {
        "turns": turns, "streams": 8, "suspicious": suspicious, "cached_tokens_by_turn": turn_tokens,
        "hot_equals_cold": sum(difference is None for difference in differing),
        "gaps_at_differences": [difference for difference in differing if difference is not None],
    }  # fmt: skip


def _is_suspicious(tokens: list[int]) -> bool:
    """Token 0, or one token eight times in a row: how corrupted states have shown elsewhere."""
    run, longest = 1, 1
    for before, after in pairwise(tokens):
        run = run + 1 if before == after else 1
        longest = max(longest, run)
    return 0 in tokens or longest >= 8
