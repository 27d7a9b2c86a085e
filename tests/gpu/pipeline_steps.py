"""Many decode steps of one engine, one request at a time; the count outlives a crash."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import engine
import findings
from generate import Found, random_prompts, stream

LENGTHS = (64, 5, 700, 64)


def run(settings: dict[str, Any]) -> Found:
    model = Path(settings["model"])
    with engine.daemon(model) as daemon:
        options = {"table": daemon.address, "disable": settings.get("disable", [])}
        arguments = settings["arguments"] | {"additional_config": {"triplex": options}}
        with engine.running_engine(
            model,
            daemon.address,
            settings["stages"],
            worker_extension_cls="step_checker.StepChecker",
            **arguments,
        ) as llm:
            for name, *given in settings.get("calls", []):
                llm.collective_rpc(name, args=tuple(given))
            found = _decode(llm, settings)
            if name := settings.get("asks"):
                found[name] = llm.collective_rpc(name)
            return found


def _decode(llm: Any, settings: dict[str, Any]) -> Found:
    rows = random_prompts(list(LENGTHS))
    each = settings["steps"] // len(rows)
    for turn, row in enumerate(rows):
        note = {
            count: partial(findings.keep, settings, {"steps": turn * each + count})
            for count in range(1, each + 1)
        }
        stream(llm, row, each, at=note)
    return {"steps": each * len(rows)}
