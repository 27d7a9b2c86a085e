"""What vLLM allocates and frees on a rank from the first parameter to the end of Worker.load_model.

A step stands for one tensor of its source, in order; only what cannot change a peak is left out. vLLM 0.33.0:
v1/worker/gpu_worker.py (load_model, its max_split_size), model_executor/model_loader/{base_loader,utils}.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from ple_inference.vllm_engine.allocator import Block, CachingAllocator
from ple_inference.vllm_engine.rank_modules import Method, Module

Held = dict[str, Block]
_INT32_BYTES = 4
# Locks of Humming's kernel: 8 int32 of each of a card's multiprocessors.
_LOCKS_BYTES = 132 * 8 * _INT32_BYTES


class LoadSteps:
    """Modules are made, filled and repacked in an allocator that only counts."""

    def __init__(self, allocator: CachingAllocator, *, experts_in_place: bool) -> None:
        """`experts_in_place`: INT4 experts are repacked as the override `expert_repack` has it."""
        self._allocator, self._experts_in_place = allocator, experts_in_place
        self._held: dict[str, Held] = {}
        self._lent: list[Block] = []

    def hold(self, sizes: Iterable[int]) -> None:
        """Buffers that stay until the end."""
        for size_bytes in sizes:
            self._allocator.allocate(size_bytes)

    def pass_through(self, *sizes: int) -> None:
        """Temporaries that live together and are freed together."""
        self._release(*[self._allocator.allocate(size_bytes) for size_bytes in sizes])

    def lend(self, size_bytes: int) -> None:
        """Until `take_back`."""
        self._lent.append(self._allocator.allocate(size_bytes))

    def take_back(self) -> None:
        self._release(*self._lent)
        self._lent.clear()

    def make(self, module: Module) -> None:
        """The constructor: every parameter empty, in the checkpoint's layout."""
        self._held[module.name] = {
            name: self._allocator.allocate(size_bytes) for name, size_bytes in module.params.items()
        }

    def repack(self, module: Module) -> None:
        """process_weights_after_loading."""
        repack = _REPACK.get(module.method)
        if repack is not None:
            repack(self, module, self._held[module.name])

    def marlin(self, module: Module, held: Held) -> None:
        """kernels/linear/mixed_precision/marlin.py: a contiguous transposed copy, then the repacked weight.

        Both have the checkpoint's bytes: no shape of this model needs a tile's padding. No zero points.
        """
        for name in ("weight_packed", "weight_scale"):
            copy, repacked = self._like(module, name), self._like(module, name)
            self._release(copy, held[name])
            held[name] = repacked

    def humming(self, module: Module, held: Held) -> None:
        """kernels/linear/mixed_precision/humming.py and humming 0.1.19: schema/humming.py, transform.py.

        Every value is unpacked to int32 to look for the smallest code, which is there in weights that use
        the whole range; else Humming would convert them to sign and magnitude, with five such temporaries.
        Then padding by nothing, which copies, and the repacked weight of the same bytes.
        """
        unpacked = self._allocator.allocate(module.values * _INT32_BYTES)
        self.pass_through(module.values)
        self._release(unpacked)
        padded = [self._like(module, "weight_packed"), self._like(module, "weight_scale")]
        weight = self._like(module, "weight_packed")
        transposed, scale = self._like(module, "weight_scale"), self._like(module, "weight_scale")
        self._release(transposed, *padded, *held.values())
        held.clear()
        held |= {"weight": weight, "weight_scale": scale}
        self._allocator.allocate(_LOCKS_BYTES)

    def marlin_experts(self, module: Module, held: Held) -> None:
        """fused_moe/oracle/int_wna16.py, _process_weights_marlin: all experts of a layer at once.

        First transposed copies of weights and scales, which live until the end, then the repacked ones:
        a layer's experts are there three times. An expert's own temporary comes and goes 512 times.
        """
        names = ("w13_weight_packed", "w2_weight_packed", "w13_weight_scale", "w2_weight_scale")
        if self._experts_in_place:
            for name in names:
                one_bytes = module.params[name] // module.experts
                self.pass_through(one_bytes, one_bytes, one_bytes)  # turned, repacked, and that once more
            return
        copies = [self._like(module, name) for name in names]
        repacked: Held = {}
        for name in names:
            repacked[name] = self._like(module, name)
            self.pass_through(module.params[name] // module.experts)
        self._release(*copies, *[held[name] for name in names])
        held |= repacked

    def fp8_marlin_experts(self, module: Module, held: Held) -> None:
        """layers/quantization/utils/marlin_utils_fp8.py, prepare_fp8_moe_layer_for_marlin.

        Expert by expert, and then all of them into one tensor. Scales of blocks become bf16 scales of
        groups: one for each row and 128 columns.
        """
        repacked: Held = {}
        for part in ("w13", "w2"):
            name = f"{part}_weight"
            repacked[name] = self._gathered(
                module.params[name] // module.experts, module.experts, copied=True
            )
        for part in ("w13", "w2"):
            name = f"{part}_weight_scale_inv"
            scale_bytes = module.group_scale_bytes(name)
            spread = self._allocator.allocate(scale_bytes)
            permuted = self._gathered(scale_bytes // module.experts, module.experts, copied=False)
            repacked[name] = self._allocator.allocate(scale_bytes)  # times the exponent's bias
            self._release(spread, permuted)
        self._release(*[held[name] for name in repacked])
        held |= repacked

    def _gathered(self, size_bytes: int, count: int, *, copied: bool) -> Block:
        pieces: list[Block] = []
        copy: Block | None = None
        for _ in range(count):
            if copy is not None:
                self._release(copy)
            copy = self._allocator.allocate(size_bytes) if copied else None
            pieces.append(self._allocator.allocate(size_bytes))
        whole = self._allocator.allocate(size_bytes * count)
        self._release(*pieces, *([copy] if copy is not None else ()))
        return whole

    def _like(self, module: Module, name: str) -> Block:
        return self._allocator.allocate(module.params[name])

    def _release(self, *blocks: Block) -> None:
        for block in blocks:
            self._allocator.free(block)


_REPACK: Mapping[Method, Callable[[LoadSteps, Module, Held], None]] = {
    Method.MARLIN: LoadSteps.marlin,
    Method.HUMMING: LoadSteps.humming,
    Method.MARLIN_EXPERTS: LoadSteps.marlin_experts,
    Method.FP8_MARLIN_EXPERTS: LoadSteps.fp8_marlin_experts,
}
