"""Proves the vLLM plugin on GPUs and prints a table.

    python tests/gpu/run.py --out DIR                     all parts, the most important first
    python tests/gpu/run.py --out DIR --only outputs      log-probabilities, kills, soak
    python tests/gpu/run.py --out DIR --only cost cold    a step's lookups, a cold prompt
    python tests/gpu/run.py --out DIR --only quant        INT4-mixed; so quant_off, _fp8, _linears, _pinned
    python tests/gpu/run.py --out DIR --pp 3              three stages, on a machine with three GPUs
    python tests/gpu/run.py --out DIR --one-card          stages share a card: for outputs and memory

Needs vLLM 0.33.0 with the plugin, the packages of daemon and client, bench/ on the path, and GPUs of 100 GB.
Each scenario runs in a process of its own and has a deadline.
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import one_card
import report
from engine import run_scenario
from quant import QuantParts

PARTS = ("outputs", "cost", "cold", "quant", "quant_off", "quant_fp8", "quant_linears", "quant_pinned")
_SEVERAL = {"outputs", "quant", "quant_off", "quant_fp8"}
LENGTHS = [64, 5, 700, 2500, 4000]
SECONDS = 570.0
"""Where a command is killed after ten minutes."""
Found = dict[str, Any]


def main() -> None:
    options = _arguments()
    gpus = _count_gpus()
    needed = options.pp if _SEVERAL & set(options.only) and not options.one_card else 1
    if gpus < needed:
        sys.exit(f"run.py: --pp {options.pp} needs {needed} GPUs, this machine has {gpus}")
    options.out.mkdir(parents=True, exist_ok=True)
    run = Run(options)
    lines: list[str] = []
    for part in PARTS:
        if part in options.only:
            lines += getattr(run.quantized if part.startswith("quant") else run, part)()
    print("\n".join(lines))
    (options.out / "table.txt").write_text("\n".join(lines) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="where logs and findings go")
    parser.add_argument("--pp", type=int, default=2, help="stages of the run that is held against one (2)")
    parser.add_argument("--only", nargs="*", default=PARTS, choices=PARTS, help="which parts (all)")
    parser.add_argument("--one-card", action="store_true", help="all stages on the first card")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS,
        help=f"for the parts named quant; the next command goes on with what is missing ({SECONDS:g})",
    )  # fmt: skip
    default = Path("/tmp/triplex-gpu/model")
    parser.add_argument("--model", type=Path, default=default, help=f"where the checkpoint goes ({default})")
    return parser.parse_args()


class Run:
    """One run of the script. Each part returns lines of the table."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._out, self._model, self._pp = options.out, options.model, options.pp
        self._one_card = options.one_card
        self._start_s = time.monotonic()
        self.quantized = QuantParts(self._out, self._model, self._pp, options.seconds, self._run)

    def outputs(self) -> list[str]:
        """One stage, several stages and Transformers on one checkpoint."""
        if not (self._model / "model.safetensors.index.json").exists():
            settings = {"model": str(self._model), "layers": 8, "experts": 128, "table_rows_base": 200_000}
            written = self._run("real_checkpoint", settings, 240, "0")
            if "error" in written:
                return report.failure("checkpoint", written)
        with ThreadPoolExecutor(2) as both:
            one = both.submit(self._run, "answers_pp1", self._answers(1), 450, "0")
            reference = {"model": str(self._model), "lengths": LENGTHS}
            theirs = both.submit(self._run, "reference", reference, 450, "1")
        extras = {"kills": True, "soak": 4}
        gpus = ",".join(str(number) for number in range(self._pp))
        several = self._run(f"answers_pp{self._pp}", self._answers(self._pp) | extras, 450, gpus)
        return report.outputs(one.result(), several, theirs.result(), self._pp)

    def cost(self) -> list[str]:
        """What the daemon's lookups add to a decode step of a third of the real model."""
        folder = str(self._model.parent / "cost")
        settings = {"model": folder, "layers": 16, "experts": 512, "table_rows_base": 200_000}
        event = report.event(self._run("external_event", {}, 60, "0"))
        return event + report.cost(self._run("lookup_cost", settings, 300, "0"))

    def cold(self) -> list[str]:
        """Time to first token with and without hints."""
        settings = {"model": str(self._model.parent / "cold"), "layers": 8, "experts": 128,
                    "table_mib": 17_408, "tokens": 8_192, "rounds": 5}  # fmt: skip
        return report.cold(self._run("cold_prompt", settings, 450, "0"))

    def _answers(self, pp: int) -> Found:
        # One stage takes every prompt whole, several take chunks: the comparison covers both.
        return {
            "model": str(self._model), "pp": pp, "lengths": LENGTHS, "scenario": "answers",
            "max_num_batched_tokens": 4096 if pp == 1 else 1024,
        }  # fmt: skip

    def _run(self, name: str, settings: Found, deadline_s: float, gpus: str) -> Found:
        where = ("0", one_card.ENVIRONMENT) if self._one_card else (gpus, {})
        found = run_scenario(name, settings, self._out, deadline_s, *where)
        now_s = time.monotonic() - self._start_s
        print(
            f"[{now_s:5.0f} s] {name}: {found.get('error', 'ok')} ({found['taken_s']:.0f} s)",
            file=sys.stderr,
            flush=True,
        )
        return found


def _count_gpus() -> int:
    import torch

    return torch.cuda.device_count()


if __name__ == "__main__":
    main()
