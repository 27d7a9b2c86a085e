"""Random values of one tensor, a block of rows at a time: each block has a seed of its own.

A block depends on nothing but the checkpoint's seed, the tensor's name and the block's first row: blocks
can be drawn in any order by any number of threads, and memory is bounded by the block.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ple_inference.quantized.packing import pack
from ple_inference.quantized.scheme import Scheme
from ple_inference.tiny.weights import number_rows

# As stored: an expert's matrix is one block. What is drawn and packed takes some tens of times as much.
_BLOCK_BYTES = 1 << 21
# Integers of 6 and 8 bits are normal with this part of half their range: one in 16,000 meets the limit.
_SIGMA_OF_HALF = 0.25
# Deviation of the 4-bit integers that `Nibbles` draws.
_NIBBLE_STD = 4.213
_EVERY_NIBBLE = np.uint64(0x1111_1111_1111_1111)
_ALL_BUT_THE_LOWEST = np.uint64(0x8888_8888_8888_8880)
# Sign, the low three of four bits of exponent, mantissa: e4m3 from -1.875 to 1.875, zeros and subnormals too.
_SMALL_FP8 = np.uint64(0xBFBF_BFBF_BFBF_BFBF)
# Deviation of those.
_FP8_STD = 0.5984


class Draw(Protocol):
    """How the values of a tensor come about."""

    def rows(self, random: np.random.Generator, first: int, count: int, columns: int) -> Tensor:
        """[count, columns] in the tensor's dtype: its rows from `first` on."""


def block_bounds(rows: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    """(first row, number of rows) of each block of a tensor."""
    step = max(1, _BLOCK_BYTES // row_bytes)
    for first in range(0, rows, step):
        yield first, min(step, rows - first)


def generator(name: str, first: int, seed: int) -> np.random.Generator:
    digest = hashlib.sha256(f"{seed}:{name}:{first}".encode()).digest()
    return np.random.Generator(np.random.SFC64(int.from_bytes(digest[:16], "little")))


@dataclass(frozen=True)
class Normal:
    """bf16."""

    std: float
    mean: float = 0.0

    def rows(self, random: np.random.Generator, first: int, count: int, columns: int) -> Tensor:
        del first
        return _normal(random, count, columns).mul_(self.std).add_(self.mean).to(torch.bfloat16)


@dataclass(frozen=True)
class Uniform:
    """bf16 from `low` to `high`."""

    low: float
    high: float
    dtype: torch.dtype = torch.bfloat16

    def rows(self, random: np.random.Generator, first: int, count: int, columns: int) -> Tensor:
        del first
        values = torch.from_numpy(random.random((count, columns), dtype=np.float32))
        return values.mul_(self.high - self.low).add_(self.low).to(self.dtype)


def scales(around: float, dtype: torch.dtype) -> Uniform:
    """Scales that all differ, and whose mean is `around`."""
    return Uniform(0.75 * around, 1.25 * around, dtype)


@dataclass(frozen=True)
class Integers:
    """Packed words of normal integers, all `weight_packed` [N, words] but the experts'."""

    scheme: Scheme
    values: int
    """Of a row, before packing."""

    @property
    def std(self) -> float:
        return _SIGMA_OF_HALF * (1 << (self.scheme.bits - 1))

    def rows(self, random: np.random.Generator, first: int, count: int, columns: int) -> Tensor:
        del first, columns
        half = 1 << (self.scheme.bits - 1)
        drawn = _normal(random, count, self.values).mul_(self.std).round_()
        return pack(drawn.clamp_(-half, half - 1).to(torch.int8), self.scheme.bits)


@dataclass(frozen=True)
class Nibbles:
    """Packed words of 4-bit integers, drawn as words: the experts are most of a checkpoint.

    Uniform, but -8 is 0 instead except in every sixteenth column: a mean of -1/2 would be the largest
    singular value of the weight.
    """

    std: float = _NIBBLE_STD

    def rows(self, random: np.random.Generator, first: int, count: int, columns: int) -> Tensor:
        del first
        words = _words(random, count * columns * 4)
        zero = words >> np.uint64(1)
        zero |= words
        zero |= zero >> np.uint64(2)
        np.invert(zero, out=zero)
        zero &= _EVERY_NIBBLE
        zero <<= np.uint64(3)
        zero &= _ALL_BUT_THE_LOWEST
        words |= zero
        return torch.from_numpy(words.view(np.int32)[: count * columns].reshape(count, columns))


@dataclass(frozen=True)
class Fp8:
    """e4m3 numbers up to 1.875 in size."""

    std: float = _FP8_STD

    def rows(self, random: np.random.Generator, first: int, count: int, columns: int) -> Tensor:
        del first
        codes = (_words(random, count * columns) & _SMALL_FP8).view(np.uint8)[: count * columns]
        return torch.from_numpy(codes.reshape(count, columns)).view(torch.float8_e4m3fn)


@dataclass(frozen=True)
class TableRows:
    """Rows of the n-gram table that carry their numbers, so that no two are equal."""

    values: Draw
    first_row: int
    """Number of the shard's first row in the table."""

    def rows(self, random: np.random.Generator, first: int, count: int, columns: int) -> Tensor:
        return number_rows(self.values.rows(random, first, count, columns), self.first_row + first)


@dataclass(frozen=True)
class Constant:
    """Values that are not random."""

    values: Tensor

    def rows(self, random: np.random.Generator, first: int, count: int, columns: int) -> Tensor:
        del random
        return self.values.reshape(-1, columns)[first : first + count]


def _normal(random: np.random.Generator, count: int, columns: int) -> Tensor:
    return torch.from_numpy(random.standard_normal((count, columns), dtype=np.float32))


def _words(random: np.random.Generator, count_bytes: int) -> np.ndarray:
    """At least so many random bytes, as uint64."""
    return random.integers(0, 1 << 64, -(-count_bytes // 8), dtype=np.uint64)
