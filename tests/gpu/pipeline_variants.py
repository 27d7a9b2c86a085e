"""Why two stages with INT4-mixed die on rank 0: one thing changed at a time. Each is a row of the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STEPS = 600
FEW_STEPS = 60
SANITIZER, DEBUGGER = Path("/usr/local/cuda/bin/compute-sanitizer"), Path("/usr/local/cuda/bin/cuda-gdb")
CHECKPOINTS = ("int4", "plain", "bf16")
"""INT4-mixed; the same with embedding and head in BF16; BF16 throughout."""
# Several engines on each GPU: bytes of K/V are given, neighbours come and go while one would measure.
_ARGUMENTS = {
    "gpu_memory_utilization": 0.2, "kv_cache_memory_bytes": 4 << 30, "max_num_batched_tokens": 1024,
}  # fmt: skip
_DUMP = {
    "CUDA_ENABLE_COREDUMP_ON_EXCEPTION": "1",
    "CUDA_COREDUMP_SHOW_PROGRESS": "1",
    "CUDA_COREDUMP_GENERATION_FLAGS": "skip_global_memory,skip_shared_memory,skip_local_memory,"
    "skip_constbank_memory",
}


@dataclass(frozen=True)
class Variant:
    label: str
    checkpoint: str = "int4"
    arguments: Mapping[str, Any] = field(default_factory=dict)
    disable: Sequence[str] = ()
    calls: Sequence[Sequence[str]] = ()
    """Methods of StepChecker, with arguments, before the first step; MODEL stands for the checkpoint."""
    asks: str = ""
    """A method whose answer is shown."""
    environment: Mapping[str, str] = field(default_factory=dict)
    before: Sequence[str] = ()
    steps: int = STEPS
    stages: int = 2

    @property
    def name(self) -> str:
        words = "".join(letter if letter.isalnum() else "_" for letter in self.label)
        return f"pipeline_{words}"

    def settings(self, model: Path) -> dict[str, Any]:
        return {
            "scenario": "pipeline_steps", "model": str(model), "steps": self.steps,
            "stages": self.stages,
            "arguments": _ARGUMENTS | dict(self.arguments), "disable": list(self.disable),
            "calls": [[str(model) if word == MODEL else word for word in call] for call in self.calls],
            "asks": self.asks,
        }  # fmt: skip


MODEL = "MODEL"


def variants(out: Path) -> tuple[Variant, ...]:
    off = ["pp_step_stream"]
    return (
        Variant("INT4-mixed"),
        Variant("INT4-mixed, pp_step_stream off", disable=off),
        Variant("BF16", "bf16"),
        Variant("BF16, pp_step_stream off", "bf16", disable=off),
    )
