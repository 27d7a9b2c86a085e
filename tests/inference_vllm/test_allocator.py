"""The rules of PyTorch's allocator, as its source has them."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from ple_inference.vllm_engine.allocator import Block, CachingAllocator, OutOfMemory

MIB = 2**20


def test_small_ones_share_two_mebibytes() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(size) for size in (1, 513, MIB)]
    assert allocator.allocated_bytes == 512 + 1024 + MIB
    assert allocator.reserved_bytes == 2 * MIB
    allocator.allocate(MIB)
    assert allocator.reserved_bytes == 4 * MIB
    for block in blocks:
        allocator.free(block)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 2 * MIB  # that of the last one, whole again otherwise


def test_middle_ones_share_twenty_and_large_ones_have_their_own() -> None:
    allocator = CachingAllocator()
    allocator.allocate(MIB + 1)
    assert allocator.reserved_bytes == 20 * MIB
    allocator.allocate(9 * MIB)
    allocator.allocate(8 * MIB)
    assert allocator.reserved_bytes == 20 * MIB
    allocator.allocate(10 * MIB)
    allocator.allocate(11 * MIB + 1)
    assert allocator.reserved_bytes == (20 + 10 + 12) * MIB


def test_the_smallest_that_fits_is_taken_and_split() -> None:
    allocator = CachingAllocator()
    large, small = allocator.allocate(64 * MIB), allocator.allocate(32 * MIB)
    allocator.free(large)
    allocator.free(small)
    again = allocator.allocate(30 * MIB)
    assert again.address == small.address
    assert allocator.allocated_bytes == 30 * MIB
    assert allocator.allocate(2 * MIB).address == small.address + 30 * MIB
    assert allocator.reserved_bytes == 96 * MIB


def test_neighbours_become_one_again() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(5 * MIB) for _ in range(4)]
    for number in (0, 2, 1, 3):
        allocator.free(blocks[number])
    assert allocator.allocate(20 * MIB).size_bytes == 20 * MIB
    assert allocator.reserved_bytes == 20 * MIB
    alone = allocator.allocate(MIB)
    allocator.free(alone)
    with pytest.raises(ValueError, match="free already"):
        allocator.free(alone)


def test_a_limit_on_splitting() -> None:
    """While vLLM loads: large blocks stay whole, are lent to their like alone, and count as a whole."""
    allocator = CachingAllocator(max_split_bytes=20 * MIB)
    block = allocator.allocate(64 * MIB)
    allocator.free(block)
    assert allocator.allocate(30 * MIB).size_bytes == 30 * MIB  # 64 is larger by more than 20
    assert allocator.reserved_bytes == 94 * MIB
    assert allocator.allocate(45 * MIB).size_bytes == 64 * MIB
    assert allocator.allocated_bytes == 94 * MIB


def test_a_free_segment_of_twenty_is_not_lent_to_smaller_ones() -> None:
    allocator = CachingAllocator(max_split_bytes=20 * MIB)
    first = allocator.allocate(3 * MIB)
    allocator.free(first)
    allocator.allocate(3 * MIB)
    assert allocator.reserved_bytes == 40 * MIB
    allocator.empty_cache()
    assert allocator.reserved_bytes == 20 * MIB
    assert allocator.peak_reserved_bytes == 40 * MIB


def test_a_full_gpu_gives_back_first() -> None:
    allocator = CachingAllocator(capacity_bytes=100 * MIB)
    allocator.free(allocator.allocate(60 * MIB))
    allocator.allocate(70 * MIB)
    assert allocator.reserved_bytes == 70 * MIB
    with pytest.raises(OutOfMemory):
        allocator.allocate(40 * MIB)


@pytest.mark.parametrize("max_split_bytes", [None, 20 * MIB])
@pytest.mark.parametrize("seed", range(3))
def test_bytes_always_add_up(seed: int, max_split_bytes: int | None) -> None:
    """No two blocks in use overlap, and all that is freed can be given back."""
    draw = random.Random(seed)
    allocator = CachingAllocator(max_split_bytes=max_split_bytes)
    used: list[Block] = []
    for _ in range(2000):
        if used and draw.random() < 0.5:
            allocator.free(used.pop(draw.randrange(len(used))))
        else:
            used.append(allocator.allocate(int(2 ** draw.uniform(5, 26))))
        if draw.random() < 0.01:
            allocator.empty_cache()
        assert allocator.allocated_bytes == sum(block.size_bytes for block in used)
        assert allocator.allocated_bytes <= allocator.reserved_bytes <= allocator.peak_reserved_bytes
    spans = sorted((block.address, block.address + block.size_bytes) for block in used)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    for block in used:
        allocator.free(block)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0
