"""One engine on a quantized checkpoint: what it holds, its log-probabilities, greedy answers and steps."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import engine
import findings
from answers import prompt_logits
from generate import Found, greedy, random_prompts, stream

WARM_STEPS = 16


def run(settings: dict[str, Any]) -> Found:
    model = Path(settings["model"])
    with engine.daemon(model) as daemon:
        options = {"table": daemon.address, "disable": settings.get("disable", [])}
        arguments = settings.get("arguments", {}) | {"additional_config": {"triplex": options}}
        with engine.running_engine(
            model,
            daemon.address,
            settings["pp"],
            worker_extension_cls="quant_recorder.QuantRecorder",
            **arguments,
        ) as llm:
            return _ask(llm, settings)


def _ask(llm: Any, settings: dict[str, Any]) -> Found:
    rows = random_prompts(settings["lengths"])
    found: Found = {
        "memory": llm.collective_rpc("memory_when_loaded"),
        "kernels": llm.collective_rpc("kernels"),
    }
    findings.keep(settings, found)
    found["prompt"] = [prompt_logits(llm, row) for row in rows]
    findings.keep(settings, found)
    if settings.get("steps"):
        found["alone"] = [greedy(llm, [row], 24)[0] for row in rows]
        findings.keep(settings, found)
        steps_s = [stream(llm, rows[0], settings["steps"])["steps_s"][WARM_STEPS:] for _ in range(3)]
        found["step_ms"] = [statistics.median(turn) * 1e3 for turn in steps_s]
    return found
