"""Proves the vLLM plugin on GPUs and prints a table.

    python tests/gpu/run.py --out DIR                        all parts, the most important first
    python tests/gpu/run.py --out DIR --only must            outputs, kills and soak
    python tests/gpu/run.py --out DIR --only cost cold       a step's lookups, a cold prompt
    python tests/gpu/run.py --out DIR --pp 3                 three stages, on a machine with three GPUs

Needs vLLM 0.33.0 with the plugin, the daemon's and `ple_rpc`'s packages, and two GPUs of 80 GB for PP=2.
Scenarios run in processes of their own, two side by side where GPUs allow; each has a deadline.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from compare import agreement, answers_agreement
from engine import run_scenario

PARTS = ("smoke", "must", "cost", "cold")
LENGTHS = [64, 5, 700, 2500, 4000]
KEYS = (
    "rows_checked", "owners", "table_pages_read_by_loading", "block_size", "cached_tokens", "kills", "soak",
    "table", "memory_gib", "ended_by_itself",
)  # fmt: skip
Found = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="where logs and findings go")
    parser.add_argument(
        "--pp", type=int, default=2, help="pipeline stages of the run that is compared with one (2)"
    )
    parser.add_argument(
        "--only", nargs="*", default=["must", "cost", "cold"], choices=PARTS, help="which parts"
    )
    parser.add_argument(
        "--model", type=Path, default=Path("/tmp/triplex-gpu/model"), help="where the checkpoint goes"
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    gpus = _count_gpus()
    if gpus < options.pp:
        sys.exit(f"run.py: --pp {options.pp} needs {options.pp} GPUs, this machine has {gpus}")
    run = Run(options.out, options.model, options.pp, gpus)
    if "smoke" in options.only:
        run.smoke()
    if "must" in options.only:
        run.must()
    if "cost" in options.only:
        run.cost()
    if "cold" in options.only:
        run.cold()
    print(run.table())
    (options.out / "table.txt").write_text(run.table() + "\n")


class Run:
    """One run of the script: scenarios, and lines of the table they give."""

    def __init__(self, out: Path, model: Path, pp: int, gpus: int) -> None:
        self._out, self._model, self._pp, self._gpus = out, model, pp, gpus
        self._lines: list[str] = []
        self._start_s = time.monotonic()

    def table(self) -> str:
        return "\n".join(self._lines)

    def smoke(self) -> None:
        """One start of each kind, small."""
        self._checkpoint()
        settings = self._answers(1) | {"lengths": [5, 64], "scenario": "answers"}
        self._say("smoke pp=1", self._run("smoke_pp1", settings, 280, "0"))

    def must(self) -> None:
        self._checkpoint()
        with ThreadPoolExecutor(2) as both:
            one = both.submit(self._run, "answers_pp1", self._answers(1), 330, "0")
            theirs = both.submit(
                self._run, "reference", {"model": str(self._model), "lengths": LENGTHS}, 330, "1"
            )
        several = self._run(
            f"answers_pp{self._pp}",
            self._answers(self._pp) | {"kills": True, "soak": 4},
            400,
            _names(self._pp),
        )
        self._compare(one.result(), several, theirs.result())

    def cost(self) -> None:
        """What the daemon's lookups add to a decode step of a third of the real model."""
        folder = str(self._model.parent / "cost")
        settings = {"model": folder, "layers": 16, "experts": 512, "table_rows_base": 200_000}
        self._report_cost(self._run("lookup_cost", settings, 400, "0"))

    def cold(self) -> None:
        """Time to first token with and without hints."""
        settings = {"model": str(self._model.parent / "cold"), "layers": 8, "experts": 128,
                    "table_mib": 17_408, "tokens": 8_192, "rounds": 5}  # fmt: skip
        found = self._run("cold_prompt", settings, 400, str(self._gpus - 1))
        self._say("cold prompt of 8,192 tokens", found)

    def _checkpoint(self) -> None:
        if not (self._model / "model.safetensors.index.json").exists():
            settings = {"model": str(self._model), "layers": 8, "experts": 128, "table_rows_base": 200_000}
            self._say("checkpoint", self._run("write_checkpoint", settings, 240, "0"))

    def _answers(self, pp: int) -> Found:
        # One stage takes every prompt whole, several take chunks: the comparison covers both.
        return {
            "model": str(self._model), "pp": pp, "lengths": LENGTHS, "scenario": "answers",
            "max_num_batched_tokens": 4096 if pp == 1 else 1024,
        }  # fmt: skip

    def _compare(self, one: Found, several: Found, theirs: Found) -> None:
        name = f"pp={self._pp}"
        for label, found in (("pp=1", one), (name, several), ("reference", theirs)):
            if "error" in found:
                self._say(label, found)
        pairs = (("pp=1 / Transformers", one, theirs, "prompt"), (f"{name} / pp=1", several, one, "prompt"),
                 (f"{name} / Transformers", several, theirs, "prompt"),
                 ("pp=1 / Transformers, scrambled table", one, theirs, "scrambled"))  # fmt: skip
        for label, a, b, key in pairs:
            if "prompt" in a and key in b:
                self._line(label, agreement(a["prompt"], b[key]))
        for label, found in (("pp=1", one), (name, several)):
            for key in KEYS:
                if key in found:
                    self._line(f"{label} {key}", found[key])
        for label, found in (("pp=1", one), (name, several)):
            for key in ("again", "together"):
                if key in found:
                    self._line(
                        f"{label} greedy, alone / {key}", answers_agreement(found["alone"], found[key])
                    )
        if "alone" in one and "alone" in several:
            self._line(f"{name} / pp=1 greedy", answers_agreement(several["alone"], one["alone"]))

    def _report_cost(self, found: Found) -> None:
        if "error" in found:
            self._say("lookup cost", found)
            return
        for tokens, parts in found["parts_us"].items():
            self._line(
                f"delivery of {tokens} tokens, us", {key: round(value, 1) for key, value in parts.items()}
            )
        for streams in (1, 4):
            step = found[f"streams_{streams}"]
            self._line(
                f"decode step, {streams} streams, daemon / pinned",
                f"{step['ratio']:.3f} ({step['daemon_ms']:.3f} ms, {step['pinned_ms']:.3f} ms)",
            )

    def _run(self, name: str, settings: Found, deadline_s: float, gpus: str) -> Found:
        found = run_scenario(name, settings, self._out, deadline_s, gpus)
        now_s = time.monotonic() - self._start_s
        print(f"[{now_s:5.0f} s] {name}: {found.get('error', 'ok')} ({found['taken_s']:.0f} s)", flush=True)
        return found

    def _say(self, label: str, found: Found) -> None:
        if "error" in found:
            self._line(label, found["error"])
            self._lines += [f"    {line[:300]}" for line in found["tail"]]
        else:
            self._line(
                label, json.dumps({key: value for key, value in found.items() if key != "prompt"})[:1500]
            )

    def _line(self, label: str, value: object) -> None:
        self._lines.append(f"{label:52} {value}")


def _names(count: int) -> str:
    return ",".join(str(number) for number in range(count))


def _count_gpus() -> int:
    import torch

    return torch.cuda.device_count()


if __name__ == "__main__":
    main()
