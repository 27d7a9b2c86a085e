"""Parts of run.py for quantized checkpoints. Each scenario is a process with a deadline."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import quant_report

Found = dict[str, Any]
LENGTHS = [64, 5, 700, 2500, 4000]
PREDICTIONS = Path(__file__).parents[2] / "docs/measurements/2026-11-30-int4-mixed-prediction.json"
# As the predictions have it: loaded_memory.CASES.
TOKENS = {1: 4096, 2: 1024}
LEAST_S = 45.0
STEPS = 160
_OF_STAGES = ("placement", "pp_step_stream")
# Two stages: each needs a layer of full attention, the fourth of four.
_SMALL = {"quant": "int4-mixed", "layers": 8, "experts": 16}
# One engine of several on a GPU. Bytes of K/V are given: neighbours come and go while it would measure.
_SHARED = {"gpu_memory_utilization": 0.2, "kv_cache_memory_bytes": 4 << 30, "max_num_batched_tokens": 1024}
_SCALE = "model.layers.2.mlp.experts.7.up_proj.weight_scale"
_CAUSE = re.compile(r"\b([A-Z]\w*Error: .*|AssertionError\s*$)")
_EFFECTS = ("Engine core initialization failed", "WorkerProc initialization failed", "Worker failed")


class QuantParts:
    """What each part starts, and the lines of its table. `run` runs one scenario on GPUs."""

    def __init__(self, out: Path, model: Path, pp: int, seconds: float, run: Callable[..., Found]) -> None:
        self._out, self._folder, self._pp, self._run = out, model.parent, pp, run
        self._end_s = time.monotonic() + seconds

    def quant(self) -> list[str]:
        """INT4-mixed, 8 layers, 512 experts: one stage, several, Transformers on decoded weights, memory."""
        return self._whole("int4-mixed", several=self._pp > 1)

    def quant_fp8(self) -> list[str]:
        """The FP8 layout, 8 layers of 512 experts, in one stage."""
        return self._whole("fp8", several=False)

    def quant_off(self) -> list[str]:
        """Each override off, and a missing scale with and without the check: small checkpoints."""
        small, faulty, listed = (self._folder / name for name in ("small", "faulty", "listed"))
        settings = {
            **_SMALL, "scenario": "quant_checkpoint", "model": str(small),
            "faulty": str(faulty), "lacks": _SCALE, "listed": str(listed),
        }  # fmt: skip
        written = self._start("checkpoint_small", settings, 120, "0")
        if "error" in written:
            return quant_report.failure("checkpoint", written)
        off = ("quantized_embeddings", "hyper_connections", "qsa_projection")
        cases = {
            **{f"{name} off": (small, [name]) for name in off},
            "checkpoint_schemes off, other words": (listed, ["checkpoint_schemes"]),
            "other words": (listed, []),
            "a scale missing": (faulty, []),
            "a scale missing, schemes from config.json": (faulty, ["checkpoint_schemes"]),
            "a scale missing, nothing looks": (faulty, ["checkpoint_schemes", "complete_load"]),
            "whole": (small, []),
        }
        with ThreadPoolExecutor(4) as some:
            started = {label: some.submit(self._small, label, *case) for label, case in cases.items()}
        found = {label: future.result() for label, future in started.items()}
        lines = quant_report.endings(found)
        return lines + (self._stages(small) if self._pp > 1 else [])

    def quant_linears(self) -> list[str]:
        """One-token products by kernel."""
        return quant_report.linears(self._start("quant_linears", {}, 400, "0"))

    def quant_pinned(self) -> list[str]:
        """Rounding waste of pinned host memory."""
        return quant_report.pinned(self._start("pinned_memory", {}, 60, "0"))

    def _start(self, name: str, settings: Found, deadline_s: float, gpus: str) -> Found:
        """Run a scenario, unless an earlier command on this machine has its findings, or no time is left."""
        kept = self._folder / "found" / f"{name}.json"
        if kept.exists():
            return json.loads(kept.read_text()) | {"kept": True}
        left_s = min(deadline_s, self._end_s - time.monotonic())
        if left_s < LEAST_S:
            return {"error": "no time left in this command: run it again", "tail": [], "taken_s": 0.0}
        found = self._run(name, settings, left_s, gpus)
        if "error" not in found:
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps(found))
        return found

    def _whole(self, quant: str, *, several: bool) -> list[str]:
        model = self._folder / quant
        settings = {
            "scenario": "quant_checkpoint",
            "model": str(model),
            "quant": quant,
            "layers": 8,
            "experts": 512,
        }
        written = self._start(f"checkpoint_{quant}", settings, 240, "0")
        if "error" in written:
            return quant_report.failure("checkpoint", written)
        lines = [
            quant_report.line(f"{quant} checkpoint, GiB", f"{written['gib']:.2f}, {written['taken_s']:.0f} s")
        ]
        # With one GPU, one after the other: the decoded model is 50 GB beside 12.
        with ThreadPoolExecutor(2 if self._pp > 1 else 1) as both:
            one = both.submit(self._answers, model, 1)
            reference = {"scenario": "reference", "model": str(model), "lengths": LENGTHS}
            place = str(min(1, self._pp - 1))
            theirs = both.submit(self._start, f"reference_{quant}", reference, 300, place)
        found = {1: one.result()} | ({self._pp: self._answers(model, self._pp)} if several else {})
        lines += quant_report.answers(quant, found, theirs.result())
        committed = json.loads(PREDICTIONS.read_text())
        for pp, answers in found.items():
            if predicted := committed.get(f"{quant}, PP={pp}"):
                measured = answers.get("memory", [])
                lines += quant_report.memory(f"{quant}, PP={pp}", predicted["ranks"], measured)
        return lines

    def _answers(self, model: Path, pp: int) -> Found:
        settings = {
            "scenario": "quant_answers", "model": str(model), "pp": pp, "lengths": LENGTHS, "steps": STEPS,
            "arguments": {"max_num_batched_tokens": TOKENS.get(pp, 1024)},
        }  # fmt: skip
        return self._start(f"quant_{model.name}_pp{pp}", settings, 330, _gpus(pp))

    def _small(self, label: str, model: Path, off: list[str], pp: int = 1) -> Found:
        """A start that shares its GPU with others; without findings it has the line that it ended with."""
        name = "quant_off_" + re.sub(r"\W+", "_", label)
        settings = {
            "scenario": "quant_answers", "model": str(model), "pp": pp, "lengths": LENGTHS[:3],
            "steps": STEPS if pp > 1 else 0, "arguments": _SHARED, "disable": off,
        }  # fmt: skip
        found = self._start(name, settings, 240, _gpus(pp))
        return found if "error" not in found else found | {"ended": cause(self._out / f"{name}.log")}

    def _stages(self, model: Path) -> list[str]:
        """Two stages: what each rank holds without `placement`, and what becomes of decode steps without
        `pp_step_stream`.
        """
        cases = {"two stages": [], **{f"{name} off, two stages": [name] for name in _OF_STAGES}}
        found = {label: self._small(label, model, off, 2) for label, off in cases.items()}
        return quant_report.stages(found)


def _gpus(pp: int) -> str:
    return ",".join(str(number) for number in range(pp))


def cause(log: Path) -> str:
    """The first error in a log that is not of a process that only noticed."""
    for words in log.read_text(errors="replace").splitlines() if log.exists() else ():
        match = _CAUSE.search(words)
        if match and not any(effect in words for effect in _EFFECTS):
            return match.group(1).strip()
    return "no error in the log: it ran out of time"
