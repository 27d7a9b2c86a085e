"""Time to first token of prompts whose rows were never read, with and without hints, by turns."""

from __future__ import annotations

import random
import signal
import statistics
from pathlib import Path
from typing import Any

import daemon_bench
import engine
import numpy as np
import real_checkpoint
from generate import VOCABULARY, Found, stream

from ple_daemon.cold_rows import ColdRows
from ple_daemon.source import open_table
from ple_daemon.table import Table
from ple_inference.synthetic.options import SyntheticOptions


def run(settings: dict[str, Any]) -> Found:
    folder, table_mib = Path(settings["model"]), settings["table_mib"]
    daemon_bench.FOLDER = folder
    path = daemon_bench.make_table(table_mib)
    base = table_mib * 2**20 // daemon_bench.ROW_BYTES // 16
    options = SyntheticOptions(layers=settings["layers"], experts=settings["experts"], table_rows_base=base)
    real_checkpoint.write_config(folder, options)
    with open_table(path) as table:
        ColdRows([table]).evict()
        with (
            engine.daemon(path) as daemon,
            engine.running_engine(
                folder, daemon.address, 1, load_format="dummy", enable_prefix_caching=False
            ) as llm,
        ):
            found = _take_turns(llm, daemon, table, settings["tokens"], settings["rounds"])
            return found | {
                "table_gib": path.stat().st_size / 2**30,
                "table": llm.collective_rpc("table_stats"),
            }


def _take_turns(llm: Any, daemon: engine.Daemon, table: Table, tokens: int, rounds: int) -> Found:
    rng = random.Random(3)
    cold = ColdRows([table])
    seconds: dict[str, list[float]] = {"hints": [], "no hints": []}
    cached = []
    stream(llm, [rng.randrange(1000, VOCABULARY) for _ in range(tokens)], 2)  # compiles
    for turn in range(2 * rounds):
        side = ("hints", "no hints")[turn % 2]
        llm.collective_rpc("send_hints", args=(side == "hints",))
        # Pages that the daemon has mapped cannot be dropped: a new one maps none.
        daemon.signal(signal.SIGKILL)
        daemon.start()
        stream(llm, [1, 2, 3], 1)  # connects again: a hint to a daemon that is gone is lost
        row = [rng.randrange(1000, VOCABULARY) for _ in range(tokens)]
        pages = cold.set_aside(table.hash.row_ids(np.array(row)).reshape(-1))
        cold.evict()
        cached.append(cold.count_cached(pages) / len(pages))
        seconds[side].append(stream(llm, row, 1)["steps_s"][0])
    ratio = statistics.median(seconds["no hints"]) / statistics.median(seconds["hints"])
    return {"seconds": seconds, "ratio": ratio, "cached_before": max(cached), "pages": len(pages)}
