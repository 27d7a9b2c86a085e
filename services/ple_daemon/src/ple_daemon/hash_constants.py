"""Constants of the n-gram hash, derived from a checkpoint's config.

The formula is that of transformers 5.20 (`Qwen4ExpTextNGramEmbedding`), with L the position of the layer
in `ple_layer_ids` and heads = (ngram_size - 1) * heads_per_ngram:

    size[h]       the (L * heads + h + 1)-th prime from ngram_vocab_size_base on
    offset[h]     sum of the sizes before h
    used_rows     sum of all sizes; the table is padded to a multiple of the divisor
    multiplier[i] 2 * (splitmix64(seed + 10007 * L + GOLDEN * (i + 1)) mod half) + 1,
                  half = ((2**63 - 1) // vocab_size) // 2, so that an in-vocabulary product never overflows
"""

from dataclasses import dataclass
from math import isqrt

import numpy as np
import numpy.typing as npt

_GOLDEN = 0x9E3779B97F4A7C15
_UINT64 = (1 << 64) - 1
_LAYER_STRIDE = 10007


@dataclass(frozen=True, slots=True)
class HashConstants:
    """What turns tokens into row ids. Multiplier 0 belongs to the newest token, head 0 to the bigram."""

    ngram_size: int
    heads_per_ngram: int
    eos_token_id: int
    multipliers: tuple[int, ...]
    head_sizes: tuple[int, ...]
    head_offsets: tuple[int, ...]

    @property
    def heads(self) -> int:
        return len(self.head_sizes)

    @property
    def context_length(self) -> int:
        return self.ngram_size - 1

    @property
    def used_rows(self) -> int:
        return sum(self.head_sizes)


def derive(
    *,
    vocab_size: int,
    eos_token_id: int,
    ngram_size: int = 3,
    heads_per_ngram: int = 8,
    ngram_vocab_size_base: int = 20_000_000,
    seed: int = 1234,
    ple_layer_index: int = 0,
) -> HashConstants:
    """Constants of the layer at `ple_layer_index` of `ple_layer_ids`; the defaults are the config class's."""
    heads = (ngram_size - 1) * heads_per_ngram
    first = ple_layer_index * heads
    sizes = _primes_from(ngram_vocab_size_base, first + heads)[first:]
    half = max(1, (2**63 - 1) // max(vocab_size, 1) // 2)
    start = seed + _LAYER_STRIDE * ple_layer_index
    return HashConstants(
        ngram_size=ngram_size,
        heads_per_ngram=heads_per_ngram,
        eos_token_id=eos_token_id,
        multipliers=tuple(2 * (_splitmix64(start + _GOLDEN * (i + 1)) % half) + 1 for i in range(ngram_size)),
        head_sizes=tuple(sizes),
        head_offsets=tuple(sum(sizes[:head]) for head in range(heads)),
    )


def padded_rows(used_rows: int, divisor: int) -> int:
    """Rows of a table that is padded to a multiple of `make_ngram_vocab_size_divisible_by`."""
    return -(-used_rows // divisor) * divisor


def _splitmix64(value: int) -> int:
    value = (value + _GOLDEN) & _UINT64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _UINT64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _UINT64
    return value ^ (value >> 31)


def _primes_from(base: int, count: int) -> list[int]:
    low, span = max(base, 2), max(1024, 64 * count)
    while True:
        found = np.flatnonzero(_prime_window(low, span))[:count]
        if len(found) == count:
            return [low + int(step) for step in found]
        span *= 2


def _prime_window(low: int, span: int) -> npt.NDArray[np.bool_]:
    """Primality of low .. low + span - 1, by sieving with every divisor up to the root."""
    prime = np.ones(span, dtype=bool)
    for divisor in range(2, isqrt(low + span - 1) + 1):
        first = max(divisor * divisor, -(-low // divisor) * divisor)
        prime[first - low :: divisor] = False
    return prime
