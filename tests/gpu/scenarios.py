"""What `run.py` runs, each in a process of its own: settings in, findings as JSON out."""

from __future__ import annotations

import random
import signal
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import engine
import numpy as np
from compare import gap_where_parting
from engine import Daemon, make_engine, prompts, sampling

VOCABULARY = 240_000
TOP = 5
Settings = dict[str, Any]
Found = dict[str, Any]


def write_checkpoint(settings: Settings) -> Found:
    import real_checkpoint

    folder = Path(settings["model"])
    real_checkpoint.write(folder, settings["layers"], settings["experts"], settings["table_rows_base"])
    return {"bytes": sum(path.stat().st_size for path in folder.iterdir())}


def test_prompts(lengths: list[int]) -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(1000, VOCABULARY) for _ in range(length)] for length in lengths]


def answers(settings: Settings) -> Found:
    """Logits at every prompt position, greedy tokens, prefix-cache hits, kills: all with rows compared."""
    model = Path(settings["model"])
    with engine.daemon(model) as daemon:
        residency = TableResidency(model)
        llm = make_engine(
            model, daemon.address, settings["pp"], max_num_batched_tokens=settings["max_num_batched_tokens"]
        )
        found: Found = {"table_pages_read_by_loading": residency.pages_read(), "block_size": _block_size(llm)}
        llm.collective_rpc("check_rows", args=(str(model),))
        rows = test_prompts(settings["lengths"])
        found["prompt"] = [_prompt_logits(llm, row) for row in rows]
        found["alone"] = [_tokens(llm, [row], 24)[0] for row in rows]
        found["again"] = [_tokens(llm, [row], 24)[0] for row in rows]
        found["together"] = _tokens(llm, rows[:4], 24)
        found["cached_tokens"] = _cached_tokens(llm, rows[-1])
        if settings.get("kills"):
            found["kills"] = _kills(llm, daemon, rows[0])
        if settings.get("soak"):
            found["soak"] = _soak(llm, settings["soak"], found["block_size"])
        checked = [result for result in llm.collective_rpc("rows_checked") if result is not None]
        found["rows_checked"] = checked
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


def reference(settings: Settings) -> Found:
    """Transformers on the same checkpoint, and once more with the table's rows in another order."""
    import real_checkpoint
    import torch
    import transformers
    from transformers import Qwen4ExpForCausalLM

    transformers.logging.set_verbosity_error()
    folder = Path(settings["model"])
    model = Qwen4ExpForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map="cuda").eval()
    table = real_checkpoint.read_table(folder).view(torch.bfloat16)
    weight = model.model.layers[1].ple.ple_embedding.ngram_embedding.weight
    found: Found = {}
    rows = test_prompts(settings["lengths"])
    for name, shift in (("prompt", 0), ("scrambled", 1)):
        weight.data.copy_(torch.roll(table, shift, 0))
        found[name] = [_reference_logits(model, row) for row in (rows if name == "prompt" else rows[:3])]
    return found


def _reference_logits(model: Any, row: list[int]) -> list[Found]:
    import torch

    with torch.inference_mode():
        logits = model(torch.tensor([row], device="cuda"), use_cache=False).logits[0].float()
    log_probabilities = logits.log_softmax(-1)
    top = log_probabilities.topk(TOP)
    following = torch.tensor(row[1:], device="cuda")
    actual = log_probabilities[:-1].gather(1, following[:, None])[:, 0]
    return [
        {"top": ids, "top_logprobs": values, "actual": value}
        for ids, values, value in zip(
            top.indices[:-1].tolist(), top.values[:-1].tolist(), actual.tolist(), strict=True
        )
    ]


def _prompt_logits(llm: Any, row: list[int]) -> list[Found]:
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


def _tokens(llm: Any, rows: list[list[int]], count: int) -> list[Found]:
    outputs = llm.generate(prompts(rows), sampling(count, logprobs=2), use_tqdm=False)
    found = []
    for output in outputs:
        (completion,) = output.outputs
        gaps = []
        for step in completion.logprobs:
            values = sorted((entry.logprob for entry in step.values()), reverse=True)
            gaps.append(values[0] - values[1] if len(values) > 1 else 0.0)
        found.append({"tokens": list(completion.token_ids), "gaps": gaps, "cached": output.num_cached_tokens})
    return found


def _cached_tokens(llm: Any, row: list[int]) -> int | None:
    (output,) = llm.generate(prompts([row]), sampling(1), use_tqdm=False)
    cached: int | None = output.num_cached_tokens
    return cached


def _block_size(llm: Any) -> int:
    """Of the prefix cache, as a worker knows it: it is decided where the cache is planned."""
    return max(size for size in llm.collective_rpc("block_size"))


def _kills(llm: Any, daemon: Daemon, row: list[int]) -> Found:
    """One stream of greedy tokens while the daemon dies five times and hangs once."""
    count = 420
    first = _stream(llm, row, count, {})
    second = _stream(llm, row, count, {})

    def kill() -> None:
        daemon.signal(signal.SIGKILL)
        daemon.start()

    def hang() -> None:
        import threading

        daemon.signal(signal.SIGSTOP)
        threading.Timer(3.0, daemon.signal, (signal.SIGCONT,)).start()

    at = dict.fromkeys((50, 120, 190, 260, 330), kill) | {390: hang}
    disturbed = _stream(llm, row, count, at)
    return {
        "undisturbed_equal": first["tokens"] == second["tokens"],
        "disturbed_equal": disturbed["tokens"] == first["tokens"],
        "distinct": len(set(first["tokens"])),
        "longest_step_s": max(disturbed["steps_s"]),
    }


def _stream(llm: Any, row: list[int], count: int, at: dict[int, Any]) -> Found:
    """Tokens and seconds of each engine step; `at` says what happens before which token."""
    engine_ = llm.llm_engine
    engine_.add_request(f"stream-{time.monotonic_ns()}", prompts([row])[0], sampling(count))
    tokens: list[int] = []
    times = [time.perf_counter()]
    pending = dict(at)
    while engine_.has_unfinished_requests():
        for output in engine_.step():
            tokens = list(output.outputs[0].token_ids)
            times.append(time.perf_counter())
        for due in [number for number in pending if number <= len(tokens)]:
            pending.pop(due)()
    return {"tokens": tokens, "steps_s": [after - before for before, after in pairwise(times)]}


def _soak(llm: Any, turns: int, block: int) -> Found:
    """Growing conversations on eight streams, lengths around block boundaries; then the last turns cold."""
    rng = random.Random(11)
    chats = [[rng.randrange(1000, VOCABULARY) for _ in range(max(8, block - 4) + 2 * n)] for n in range(8)]
    suspicious, turn_tokens = [], []
    for _ in range(turns):
        answered = _tokens(llm, chats, 32)
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
    cold = _tokens(llm, last, 32)
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


def lookup_cost(settings: Settings) -> Found:
    """Decode steps of one engine whose rows come from the daemon and from pinned memory by turns."""
    import real_checkpoint

    model = Path(settings["model"])
    config = real_checkpoint.text_config(settings["layers"], settings["experts"], settings["table_rows_base"])
    real_checkpoint.write_table(model, config)
    found: Found = {}
    with engine.daemon(model) as daemon:
        llm = make_engine(
            model, daemon.address, 1, load_format="dummy", enable_prefix_caching=False, max_num_seqs=4,
            max_num_batched_tokens=512,
            compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4]},
        )  # fmt: skip
        _wait_for(settings.get("after"))
        found["parts_us"] = {
            str(tokens): llm.collective_rpc("time_delivery", args=(tokens, 300))[0] for tokens in (1, 4, 512)
        }
        for streams in (1, 4):
            found[f"streams_{streams}"] = _compare_sources(llm, str(model), streams)
        found["table"] = llm.collective_rpc("table_stats")
    return found


def cold_prompt(settings: Settings) -> Found:
    """Time to first token of prompts whose rows were never read, with and without hints, by turns."""
    import daemon_bench
    import real_checkpoint

    from ple_daemon.cold_rows import ColdRows
    from ple_daemon.source import open_table

    daemon_bench.FOLDER = Path(settings["model"])
    table_mib = settings["table_mib"]
    path = daemon_bench.make_table(table_mib)
    base = table_mib * 2**20 // daemon_bench.ROW_BYTES // 16
    config = real_checkpoint.text_config(settings["layers"], settings["experts"], base)
    real_checkpoint.write_config(Path(settings["model"]), config)
    with open_table(path) as table:
        cold = ColdRows([table])
        cold.evict()
        with engine.daemon(path) as daemon:
            llm = make_engine(
                Path(settings["model"]), daemon.address, 1, load_format="dummy", enable_prefix_caching=False
            )
            rng = random.Random(3)
            _stream(llm, [rng.randrange(1000, VOCABULARY) for _ in range(settings["tokens"])], 2, {})
            seconds: dict[str, list[float]] = {"hints": [], "no hints": []}
            cached = []
            for turn in range(2 * settings["rounds"]):
                side = ("hints", "no hints")[turn % 2]
                llm.collective_rpc("send_hints", args=(side == "hints",))
                row = [rng.randrange(1000, VOCABULARY) for _ in range(settings["tokens"])]
                pages = cold.set_aside(table.hash.row_ids(np.array(row)).reshape(-1))
                cold.evict()
                cached.append(cold.count_cached(pages) / len(pages))
                seconds[side].append(_stream(llm, row, 1, {})["steps_s"][0])
            stats = llm.collective_rpc("table_stats")
    ratio = statistics.median(seconds["no hints"]) / statistics.median(seconds["hints"])
    return {
        "seconds": seconds, "ratio": ratio, "cached_before": max(cached), "pages": len(pages),
        "table_gib": path.stat().st_size / 2**30, "table": stats,
    }  # fmt: skip


def _wait_for(path: str | None) -> None:
    """Until another scenario has written its findings: it would take processor time from what is timed here."""
    deadline = time.monotonic() + 400
    while path is not None and not Path(path).exists() and time.monotonic() < deadline:
        time.sleep(0.5)


def _compare_sources(llm: Any, model: str, streams: int, blocks: int = 24, steps: int = 64) -> Found:
    rows = test_prompts([64] * streams)
    engine_ = llm.llm_engine
    for source in ("pinned", "daemon"):  # the first use of one allocates and compiles
        llm.collective_rpc("use_source", args=(source, model))
    for number, row in enumerate(rows):
        engine_.add_request(f"cost-{streams}-{number}", prompts([row])[0], sampling(blocks * (steps + 8)))
    for _ in range(32):
        engine_.step()
    medians: dict[str, list[float]] = {"daemon": [], "pinned": []}
    order = ["daemon", "pinned"] * (blocks // 2)
    for source in order:
        llm.collective_rpc("use_source", args=(source, model))
        times = []
        for _ in range(steps):
            start = time.perf_counter()
            engine_.step()
            times.append(time.perf_counter() - start)
        medians[source].append(statistics.median(times[4:]) * 1e3)
    engine_.abort_request([f"cost-{streams}-{number}" for number in range(streams)])
    while engine_.has_unfinished_requests():
        engine_.step()
    daemon_ms, pinned_ms = (statistics.median(medians[source]) for source in ("daemon", "pinned"))
    ratios = [a / b for a, b in zip(medians["daemon"], medians["pinned"], strict=True)]
    return {
        "daemon_ms": daemon_ms, "pinned_ms": pinned_ms, "ratio": daemon_ms / pinned_ms,
        "ratio_of_pairs": statistics.median(ratios), "blocks": medians,
    }  # fmt: skip
