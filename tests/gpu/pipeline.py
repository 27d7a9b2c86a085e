"""The part quant_pipeline of run.py: a line for each variant of two stages, steps passed or first error."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import report
from gpu_fault import fault_in, kernel_of
from pipeline_variants import CHECKPOINTS, DEBUGGER, Variant, variants

Found = dict[str, Any]
AT_ONCE = 4
CHECKPOINT_S, VARIANT_S = 120.0, 170.0
_SMALL = {"scenario": "quant_checkpoint", "layers": 8, "experts": 16}


class Bisection:
    """`start` runs a scenario as QuantParts does, and keeps what it found, errors too."""

    def __init__(self, out: Path, folder: Path, start: Callable[..., Found]) -> None:
        self._out, self._start = out, start
        self._models = {name: folder / f"pipeline_{name}" for name in CHECKPOINTS}

    def lines(self) -> list[str]:
        with ThreadPoolExecutor(AT_ONCE) as some:
            written = [some.submit(write) for write in (self._write_int4, self._write_bf16)]
            failed = [line for future in written for line in report.failure("checkpoint", future.result())]
        if failed:
            return failed
        with ThreadPoolExecutor(AT_ONCE) as some:
            return list(some.map(self._line, variants(self._out)))

    def _write_int4(self) -> Found:
        models = {"model": str(self._models["int4"]), "plain": str(self._models["plain"])}
        settings = _SMALL | models | {"quant": "int4-mixed"}
        return self._start("checkpoint_pipeline_int4", settings, CHECKPOINT_S, "0")

    def _write_bf16(self) -> Found:
        settings = _SMALL | {"model": str(self._models["bf16"]), "quant": "none"}
        return self._start("checkpoint_pipeline_bf16", settings, CHECKPOINT_S, "1")

    def _line(self, variant: Variant) -> str:
        settings = variant.settings(self._models[variant.checkpoint])
        found = self._start(
            variant.name, settings, VARIANT_S, "0,1",
            keeps_errors=True, environment=variant.environment, before=variant.before,
        )  # fmt: skip
        return report.line(variant.label, self._outcome(variant, found))

    def _outcome(self, variant: Variant, found: Found) -> str:
        steps = found.get("steps", 0)
        log = self._out / f"{variant.name}.log"
        if "error" not in found:
            answer = f", {variant.asks} {found[variant.asks]}" if variant.asks else ""
            # The tool goes on behind what it finds.
            reported = fault_in(log.read_text(errors="replace")) if variant.before and log.exists() else ""
            return f"passed {steps} steps{answer}" + (f"; {reported}" if "=====" in reported else "")
        if not log.exists():
            return found["error"]
        outcome = f"after {steps} steps: {fault_in(log.read_text(errors='replace'))}"
        cores = [Path(path) for path in variant.environment.get("CUDA_COREDUMP_FILE", "").split() if path]
        dumped = [core for pattern in cores for core in pattern.parent.glob(pattern.name.replace("%p", "*"))]
        return " | ".join([outcome, *(kernel_of(core, DEBUGGER) for core in dumped)])
