"""Decode steps of one engine whose rows come from the daemon and from pinned memory by turns."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import engine
import real_checkpoint
from answers import survive_kills
from generate import Found, prompts, random_prompts, sampling

from ple_inference.synthetic.options import SyntheticOptions


def run(settings: dict[str, Any]) -> Found:
    model = Path(settings["model"])
    sizes = {name: settings[name] for name in ("layers", "experts", "table_rows_base")}
    real_checkpoint.write_table(model, SyntheticOptions(**sizes))
    found: Found = {}
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4]}
    with (
        engine.daemon(model) as daemon,
        engine.running_engine(
            model, daemon.address, 1, load_format="dummy", enable_prefix_caching=False, max_num_seqs=4,
            max_num_batched_tokens=512, compilation_config=graphs,
        ) as llm,
    ):  # fmt: skip
        _wait_for(settings.get("after"))
        found["parts_us"] = {
            str(tokens): llm.collective_rpc("time_delivery", args=(tokens, 300))[0] for tokens in (1, 4, 512)
        }
        for streams in (1, 4):
            found[f"streams_{streams}"] = _compare_sources(llm, str(model), streams)
        print(found, flush=True)
        llm.collective_rpc("use_source", args=("daemon", str(model)))
        llm.collective_rpc("check_rows", args=(str(model),))
        found["kills"] = survive_kills(llm, daemon, random_prompts([64])[0])
        found["rows_checked"] = llm.collective_rpc("rows_checked")
        found["table"] = llm.collective_rpc("table_stats")
    return found


def _wait_for(path: str | None) -> None:
    """Until another scenario has written its findings: it takes processor time from what is timed here."""
    deadline = time.monotonic() + 400
    while path is not None and not Path(path).exists() and time.monotonic() < deadline:
        time.sleep(0.5)


def _compare_sources(llm: Any, model: str, streams: int, blocks: int = 24, steps: int = 64) -> Found:
    rows = random_prompts([64] * streams)
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
