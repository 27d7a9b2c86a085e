"""Marlin's repack of a layer's experts, one expert at a time and where they lie.

Upstream makes transposed copies of all experts and repacks from those: a layer's experts are on the GPU
three times. A repacked expert has as many bytes as before, so it can take its own place.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, cast

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.model_executor.layers.fused_moe.oracle import int_wna16
from vllm.model_executor.layers.quantization.utils.marlin_utils import (
    marlin_moe_padded_intermediate,
    marlin_moe_permute_scales,
)

Process = Callable[..., tuple[Tensor | None, ...]]


def install() -> None:
    if not is_live():
        int_wna16._process_weights_marlin = _in_place(int_wna16._process_weights_marlin)


def is_live() -> bool:
    return hasattr(int_wna16._process_weights_marlin, "upstream")


def _in_place(upstream: Process) -> Process:
    """`upstream`, but for symmetric weights in groups, of shapes that need no padding."""

    @wraps(upstream)
    def process(
        layer: Any,
        input_dtype: torch.dtype | None,
        num_bits: int,
        pack_factor: int,
        group_size: int,
        *tensors: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        weights, others = tensors[:4], tensors[4:]
        width = layer.intermediate_size_per_partition
        eight_bit_inputs = input_dtype is not None and input_dtype.itemsize == 1
        padded = marlin_moe_padded_intermediate(width, group_size) != width
        if group_size < 1 or eight_bit_inputs or padded or any(other is not None for other in others):
            return upstream(layer, input_dtype, num_bits, pack_factor, group_size, *tensors)
        w13, w2, w13_scales, w2_scales = cast("tuple[Tensor, Tensor, Tensor, Tensor]", weights)
        return (
            repack(w13, num_bits, pack_factor),
            repack(w2, num_bits, pack_factor),
            permute(w13_scales, width, group_size),
            permute(w2_scales, w2_scales.shape[2] * group_size, group_size),
            *(None,) * 6,
        )

    process.upstream = upstream  # type: ignore[attr-defined]
    return process


def repack(weight: Tensor, num_bits: int, pack_factor: int) -> Tensor:
    """int32 [experts, rows, words] -> int32 [experts, columns / 16, rows * bits / 2], in the same memory."""
    experts, rows, words = weight.shape
    columns = words * pack_factor
    places = weight.data.view(experts, -1)
    for expert, place in zip(weight.data, places, strict=True):
        turned = expert.t().contiguous().unsqueeze(0)
        place.copy_(ops.gptq_marlin_moe_repack(turned, columns, rows, num_bits, is_a_8bit=False).view(-1))
    return places.view(experts, columns // 16, rows * (num_bits // 2))


def permute(scales: Tensor, columns: int, group_size: int) -> Tensor:
    """[experts, rows, groups] -> [experts, groups, rows] in Marlin's order, in the same memory."""
    experts, rows, groups = scales.shape
    places = scales.data.view(experts, -1)
    for expert, place in zip(scales.data, places, strict=True):
        turned = expert.t().contiguous().unsqueeze(0)
        place.copy_(marlin_moe_permute_scales(turned, columns, rows, group_size, is_a_8bit=False).view(-1))
    return places.view(experts, groups, rows)
