"""What one engine takes of the host's RAM."""

from __future__ import annotations

from dataclasses import dataclass

from ple_inference.checkpoint import Checkpoint
from ple_inference.table_check import row_element_bytes
from ple_inference.vllm_engine.launch import Launch
from ple_inference.vllm_engine.profile import GIB
from ple_inference.vllm_plugin.table_options import SLOTS
from ple_rpc.shared_region import RegionLayout

# A Python process with torch and CUDA; a guess on the low side, so that no machine is refused that would do.
_PROCESS_BYTES = 2 * GIB
# The API server and the engine core, beside one worker for each stage.
_FRONT_PROCESSES = 2


@dataclass(frozen=True)
class HostMemory:
    pinned_bytes: int
    """The region that the table's stage shares with the daemon: slots of ids and rows."""
    processes: int

    @classmethod
    def of(cls, launch: Launch) -> HostMemory:
        layout = region_layout(launch.checkpoint, launch.profile.max_num_batched_tokens)
        return cls(layout.size_bytes, _FRONT_PROCESSES + launch.pipeline.stages)

    @property
    def total_bytes(self) -> int:
        return self.pinned_bytes + self.processes * _PROCESS_BYTES


def region_layout(checkpoint: Checkpoint, max_tokens: int) -> RegionLayout:
    """The region for steps of `max_tokens`."""
    text = checkpoint.text
    heads = (int(text["ngram_size"]) - 1) * int(text["heads_per_ngram"])
    elements = int(text.get("ple_embed_dim") or text["hidden_size"])
    row_bytes = elements // heads * row_element_bytes(checkpoint.config)
    return RegionLayout(SLOTS, max_tokens * heads, row_bytes)
