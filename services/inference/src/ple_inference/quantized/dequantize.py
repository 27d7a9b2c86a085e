"""What quantized weights mean: the plain arithmetic that everything faster is held against. On any device."""

from __future__ import annotations

import torch
from torch import Tensor

from ple_inference.quantized.packing import unpack
from ple_inference.quantized.scheme import FP8_BLOCK, Scheme

# Rows are decoded this many values at a time: temporaries are several times as large as the result.
_VALUES_AT_ONCE = 1 << 24


def dequantize(
    packed: Tensor, scale: Tensor, scheme: Scheme, shape: tuple[int, int], dtype: torch.dtype = torch.float32
) -> Tensor:
    """`weight_packed` int32 and `weight_scale` f16 or bf16 [N, ceil(K / group)] -> [N, K] of `dtype`.

    The product is taken in f32 and rounded once. Raises ValueError where shapes contradict each other.
    """
    rows, columns = shape
    _same_shape("weight_packed", packed, scheme.packed_shape(rows, columns))
    _same_shape("weight_scale", scale, scheme.scale_shape(rows, columns))
    out = torch.empty(rows, columns, dtype=dtype, device=packed.device)
    step = max(1, _VALUES_AT_ONCE // columns)
    for first in range(0, rows, step):
        part = slice(first, first + step)
        spread = scale[part].float().repeat_interleave(scheme.group_size, 1)[:, :columns]
        out[part] = unpack(packed[part], scheme.bits, columns).float() * spread
    return out


def dequantize_blocks(weight: Tensor, scale_inv: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """e4m3 [N, K] and `weight_scale_inv` bf16 or f32 [ceil(N / 128), ceil(K / 128)] -> [N, K] of `dtype`."""
    rows, columns = weight.shape
    expected = (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
    if weight.dtype != torch.float8_e4m3fn or tuple(scale_inv.shape) != expected:
        raise ValueError(
            f"weight is {weight.dtype}, weight_scale_inv {list(scale_inv.shape)}, not {list(expected)}"
        )
    spread = scale_inv.float().repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)
    return (weight.float() * spread[:rows, :columns]).to(dtype)


def dequantize_rows(rows: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """e4m3 rows of the n-gram table and its one `weight_scale` [1] -> `dtype`, each factor cast to it first.

    That is the order of vLLM's `_dequantize_embeddings`: in bf16 the scale times the row is rounded once.
    """
    if rows.dtype != torch.float8_e4m3fn or scale.numel() != 1:
        raise ValueError(f"rows are {rows.dtype}, weight_scale has {scale.numel()} elements; e4m3 and 1")
    return rows.to(dtype) * scale.to(dtype)


def _same_shape(what: str, tensor: Tensor, expected: tuple[int, int]) -> None:
    if tuple(tensor.shape) != expected:
        raise ValueError(f"{what} is {list(tensor.shape)}, not {list(expected)}")
