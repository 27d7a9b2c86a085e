"""What one engine takes of the host's RAM."""

from __future__ import annotations

from dataclasses import dataclass

from ple_inference.checkpoint import Checkpoint
from ple_inference.table_check import row_type_of
from ple_inference.vllm_engine.launch import Launch
from ple_inference.vllm_engine.profile import GIB
from ple_inference.vllm_plugin.table_options import SLOTS
from ple_rpc.shared_region import RegionLayout
from ple_rpc.table.v1 import table_pb2

_ELEMENT_BYTES = {table_pb2.ROW_TYPE_FP8_E4M3: 1, table_pb2.ROW_TYPE_BF16: 2}
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
    row_bytes = elements // heads * _ELEMENT_BYTES.get(row_type_of(checkpoint.config), 2)
    return RegionLayout(SLOTS, max_tokens * heads, row_bytes)
