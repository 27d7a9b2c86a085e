"""Integers of 4, 6 or 8 bits as a dense little-endian stream of bits in int32 words.

Value q is stored as q + 2^(bits-1), k of a row in its bits [k*bits, (k+1)*bits), lowest first. A value may
straddle two words: 32 values of 6 bits take 6 words. (compressed-tensors' own packer puts 5 into a word.)
"""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor
from torch.nn.functional import pad

from ple_inference.quantized.scheme import BITS, WORD_BITS, words


def pack(q: Tensor, bits: int) -> Tensor:
    """Integers [N, K] from -2^(bits-1) up -> int32 [N, ceil(K * bits / 32)]. ValueError for others."""
    half = 1 << (_checked(bits) - 1)
    if q.numel() and not -half <= int(q.min()) <= int(q.max()) < half:
        raise ValueError(f"values from {int(q.min())} to {int(q.max())} do not fit {bits} bits")
    rows, columns = q.shape
    values, stride = _chunk(bits)
    chunks = -(-columns // values)
    unsigned = pad(q.to(torch.int32) + half, (0, chunks * values - columns)).view(rows, chunks, values)
    number = (unsigned << (torch.arange(values, dtype=torch.int32, device=q.device) * bits)).sum(
        -1, dtype=torch.int32
    )
    shifts = torch.arange(stride, dtype=torch.int32, device=q.device) * 8
    stream = ((number[..., None] >> shifts) & 0xFF).to(torch.uint8).view(rows, chunks * stride)
    out = torch.zeros(rows, words(columns, bits) * WORD_BITS // 8, dtype=torch.uint8, device=q.device)
    used = min(stream.shape[1], out.shape[1])  # what the stream has beyond the last word is padding
    out[:, :used] = stream[:, :used]
    return out.view(torch.int32)


def unpack(packed: Tensor, bits: int, columns: int) -> Tensor:
    """int32 [N, ceil(columns * bits / 32)] -> int8 [N, columns]. ValueError for another width."""
    half = 1 << (_checked(bits) - 1)
    rows, width = packed.shape
    if packed.dtype != torch.int32 or width != words(columns, bits):
        raise ValueError(
            f"{columns} values of {bits} bits take {words(columns, bits)} int32 words a row, "
            f"not {width} of {packed.dtype}"
        )
    values, stride = _chunk(bits)
    chunks = -(-columns // values)
    stream = packed.contiguous().view(torch.uint8)
    stream = pad(stream, (0, chunks * stride - stream.shape[1])).view(rows, chunks, stride).to(torch.int32)
    shifts = torch.arange(stride, dtype=torch.int32, device=packed.device) * 8
    number = (stream << shifts).sum(-1, dtype=torch.int32)
    places = torch.arange(values, dtype=torch.int32, device=packed.device) * bits
    unsigned = (number[..., None] >> places) & ((1 << bits) - 1)
    return (unsigned - half).to(torch.int8).view(rows, chunks * values)[:, :columns].contiguous()


def _chunk(bits: int) -> tuple[int, int]:
    """The fewest values that fill whole bytes, and those bytes: (2, 1), (4, 3) or (1, 1)."""
    common = gcd(bits, 8)
    return 8 // common, bits // common


def _checked(bits: int) -> int:
    if bits not in BITS:
        raise ValueError(f"weights of {bits} bits; {', '.join(map(str, BITS))} are known")
    return bits
