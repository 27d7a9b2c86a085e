"""What each rank holds on its GPU once it is loaded, and the most it takes while it loads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ple_inference.vllm_engine.allocator import CachingAllocator
from ple_inference.vllm_engine.load_steps import LoadSteps
from ple_inference.vllm_engine.profile import Profile
from ple_inference.vllm_engine.rank_modules import Module

MIB = 2**20
# v1/worker/gpu_worker.py, load_model: blocks from this size on are not split while the model loads.
_LOAD_MAX_SPLIT_BYTES = 20 * MIB
# cuBLAS' own workspace, from PyTorch's allocator since the first product of the worker's start:
# aten/src/ATen/cuda/CUDABlas.cpp, 32 MiB on compute capability 9.0, :4096:2:16:8 KiB on others.
CUBLAS_BYTES = {9: 32 * MIB}
_CUBLAS_OTHER_BYTES = (2 * 4096 + 8 * 16) * 1024


@dataclass(frozen=True)
class LoadOptions:
    """What vLLM is told, as far as buffers depend on it, and the card."""

    max_num_batched_tokens: int
    max_num_seqs: int
    compute_capability: int = 8
    """Its major number: as the card has it, whatever vLLM is told."""
    row_element_bytes: int = 2
    """Of the table: 2 in bf16, 1 in fp8."""
    experts_in_place: bool = True
    """Whether the override `expert_repack` is on."""
    capacity_bytes: int | None = None
    """Of the GPU, for PyTorch; None: as much as the load takes when nothing must be given back."""

    @classmethod
    def of(cls, profile: Profile, **others: Any) -> LoadOptions:
        return cls(profile.max_num_batched_tokens, profile.max_num_seqs, **others)


@dataclass(frozen=True)
class RankMemory:
    """As torch.cuda counts after Worker.load_model. Bytes."""

    parts: Mapping[str, int]
    """What is held, by kind; sums up to `held_bytes`."""
    allocated_bytes: int
    """memory_allocated: `held_bytes` and what the allocator rounds up."""
    reserved_bytes: int
    peak_reserved_bytes: int
    """max_memory_reserved since the start of the process."""
    peak_allocated_bytes: int
    """max_memory_allocated: what the load needs when the allocator gives back all that it can."""

    @property
    def held_bytes(self) -> int:
        return sum(self.parts.values())

    @property
    def weights_bytes(self) -> int:
        return sum(size_bytes for part, size_bytes in self.parts.items() if part not in BUFFER_PARTS)


BUFFER_PARTS = (
    "rotary cache",
    "QSA selections",
    "PLE rows and ids",
    "received activations",
    "sampler",
    "cuBLAS",
)


def rank_memories(
    ranks: Sequence[Sequence[Module]], text: Mapping[str, Any], options: LoadOptions
) -> tuple[RankMemory, ...]:
    """For each rank, by its modules. `text`: the text model's config, checked. Raises OutOfMemory."""
    last = len(ranks) - 1
    return tuple(
        _load(modules, _Buffers(text, options, modules, first=not stage, last=stage == last))
        for stage, modules in enumerate(ranks)
    )


def _load(modules: Sequence[Module], buffers: _Buffers) -> RankMemory:
    allocator = CachingAllocator(
        max_split_bytes=_LOAD_MAX_SPLIT_BYTES, capacity_bytes=buffers.options.capacity_bytes
    )
    steps = LoadSteps(allocator, experts_in_place=buffers.options.experts_in_place)
    steps.hold(buffers.before)
    for module in modules:
        for size_bytes in buffers.replaced_by(module):
            steps.lend(size_bytes)
        steps.make(module)
        steps.hold(buffers.of(module))
        if module.name.endswith("input_mix_weight_up"):
            steps.take_back()
    # The loader empties the cache between filling and repacking, and at the end.
    allocator.empty_cache()
    for module in modules:
        steps.repack(module)
    allocator.empty_cache()
    steps.hold(buffers.after)
    parts = Counter[str]()
    for module in modules:
        parts[module.part] += module.kept_bytes
    return RankMemory(
        parts | buffers.parts,
        allocator.allocated_bytes,
        allocator.reserved_bytes,
        allocator.peak_reserved_bytes,
        allocator.peak_allocated_bytes,
    )


class _Buffers:
    """Static tensors that no checkpoint has: name of a part -> bytes, and when they are made."""

    def __init__(
        self,
        text: Mapping[str, Any],
        options: LoadOptions,
        modules: Sequence[Module],
        *,
        first: bool,
        last: bool,
    ) -> None:
        self.options, self._text = options, text
        self._parts = Counter[str]()
        tokens = options.max_num_batched_tokens
        cublas = CUBLAS_BYTES.get(options.compute_capability, _CUBLAS_OTHER_BYTES)
        self.before = self._note("cuBLAS", cublas)
        self._first_attention = next((module.name for module in modules if _is_attention(module)), "")
        self.after: list[int] = []
        if last:
            # v1/worker/gpu/sample/penalties.py and structured_outputs.py, only on the last rank.
            mask_bytes = -(-text["vocab_size"] // 32) * 4 * options.max_num_seqs
            counts_bytes = text["vocab_size"] * 4 * options.max_num_seqs
            self.after += self._note("sampler", mask_bytes, counts_bytes, mask_bytes)
        if not first:
            # v1/worker/gpu/model_runner.py, load_model: hidden states of the rank before, all streams.
            received = tokens * text["hidden_size"] * text["hc_count"] * 2
            self.after += self._note("received activations", received)

    @property
    def parts(self) -> Counter[str]:
        return self._parts

    def of(self, module: Module) -> list[int]:
        """Made beside a module."""
        tokens, text = self.options.max_num_batched_tokens, self._text
        if module.name.endswith("ple.ple_embedding"):
            elements = int(text.get("ple_embed_dim") or text["hidden_size"])
            heads = (text["ngram_size"] - 1) * text["heads_per_ngram"]
            # vllm_plugin/daemon_embedding.py and nvidia/ngram_embedding.py.
            rows_bytes = tokens * elements * self.options.row_element_bytes
            return self._note("PLE rows and ids", rows_bytes, tokens * heads * 8)
        if not _is_attention(module):
            return []
        selected = text["indexer_budget"] + text["indexer_compress_ratio"]
        sizes = self._note("QSA selections", tokens * selected * 4)  # nvidia/qsa.py, topk_indices_buffer
        if module.name == self._first_attention:
            # layers/rotary_embedding: one cache for all layers with the same parameters.
            sizes += self._note("rotary cache", text["max_position_embeddings"] * _rotary_elements(text) * 2)
        return sizes

    def replaced_by(self, module: Module) -> Sequence[int]:
        """What upstream's constructor makes before a packed hyper-connection takes its place, in bf16."""
        if not module.name.endswith("input_mix_weight_down") or "weight_packed" not in module.params:
            return ()
        text = self._text
        rank, streams = text["hc_lowrank"], text["hidden_size"] * text["hc_count"]
        rows = (
            rank
            if module.name.startswith("hyper_connection_mixer")
            else -(-(rank + text["hc_count"]) // 16) * 16
        )
        return rows * streams * 2, rank * streams * 2

    def _note(self, part: str, *sizes: int) -> list[int]:
        self._parts[part] += sum(sizes)
        return list(sizes)


def _is_attention(module: Module) -> bool:
    return module.name.endswith("self_attn.qkv_proj")


def _rotary_elements(text: Mapping[str, Any]) -> int:
    rope = text.get("rope_parameters") or {}
    factor = rope.get("partial_rotary_factor", text.get("partial_rotary_factor", 0.25))
    return int(text["head_dim"] * factor)


def as_json(memory: RankMemory) -> dict[str, Any]:
    return {
        **asdict(memory),
        "parts": dict(memory.parts),
        "held_bytes": memory.held_bytes,
        "weights_bytes": memory.weights_bytes,
    }
