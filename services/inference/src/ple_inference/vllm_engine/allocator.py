"""PyTorch's caching allocator of GPU memory, as far as the bytes it reserves depend on it. Allocates nothing.

One stream, no expandable segments. The sizes stand in PyTorch's c10/core/AllocatorConfig.h. The rules are
what is known of c10/cuda/CUDACachingAllocator.cpp, not read again for this: they gave the peaks of two loads
on a GPU within 0.3 % (docs/measurements/2026-11-30-int4-mixed.md).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

_SMALL_BYTES = 2**20
"""Up to this size an allocation comes from a small segment."""
_SMALL_SEGMENT_BYTES = 2 * 2**20
_LARGE_SEGMENT_BYTES = 20 * 2**20
_OWN_SEGMENT_BYTES = 10 * 2**20
"""From this size on an allocation has a segment of its own."""
_SEGMENT_UNIT_BYTES = 2 * 2**20
_BLOCK_UNIT_BYTES = 512


class OutOfMemory(Exception):
    """More was asked for than the GPU has, after everything unused was given back."""


@dataclass(eq=False)
class Block:
    """A piece of a segment. Neighbours are of the same segment."""

    size_bytes: int
    address: int
    small: bool
    used: bool = False
    before: Block | None = field(default=None, repr=False)
    after: Block | None = field(default=None, repr=False)

    @property
    def entry(self) -> _Entry:
        """Free blocks are searched by size; of equal ones the lowest address is taken."""
        return self.size_bytes, self.address, self


_Entry = tuple[int, int, Block]


class CachingAllocator:
    """Counts as torch.cuda.memory_allocated and memory_reserved do, with their peaks."""

    def __init__(self, *, max_split_bytes: int | None = None, capacity_bytes: int | None = None) -> None:
        """`max_split_bytes`: blocks from this size on are neither split nor lent to smaller allocations."""
        self.max_split_bytes = max_split_bytes
        self._capacity_bytes = capacity_bytes
        self._free: dict[bool, list[_Entry]] = {True: [], False: []}
        self._next_address = 0
        self.allocated_bytes = self.reserved_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0

    def allocate(self, size_bytes: int) -> Block:
        """Raises OutOfMemory."""
        size_bytes = max(_BLOCK_UNIT_BYTES, _round_up(size_bytes, _BLOCK_UNIT_BYTES))
        small = size_bytes <= _SMALL_BYTES
        block = self._take_free(size_bytes, small) or self._new_segment(size_bytes, small)
        if self._is_split(block, size_bytes):
            self._split(block, size_bytes)
        block.used = True
        self.allocated_bytes += block.size_bytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: Block) -> None:
        if not block.used:
            raise ValueError("the block is free already")
        block.used = False
        self.allocated_bytes -= block.size_bytes
        self._put_free(self._merge(block))

    def empty_cache(self) -> None:
        """Give back every segment that is free as a whole."""
        for small, blocks in self._free.items():
            whole = [block for *_, block in blocks if block.before is None and block.after is None]
            self.reserved_bytes -= sum(block.size_bytes for block in whole)
            self._free[small] = [entry for entry in blocks if entry[2].before or entry[2].after]

    def _take_free(self, size_bytes: int, small: bool) -> Block | None:
        blocks = self._free[small]
        place = bisect_left(blocks, (size_bytes,))
        if place == len(blocks):
            return None
        block = blocks[place][2]
        if self.max_split_bytes is not None:
            if size_bytes < self.max_split_bytes <= block.size_bytes:
                return None
            if size_bytes >= self.max_split_bytes and block.size_bytes >= size_bytes + _LARGE_SEGMENT_BYTES:
                return None
        del blocks[place]
        return block

    def _new_segment(self, size_bytes: int, small: bool) -> Block:
        if small:
            segment_bytes = _SMALL_SEGMENT_BYTES
        elif size_bytes < _OWN_SEGMENT_BYTES:
            segment_bytes = _LARGE_SEGMENT_BYTES
        else:
            segment_bytes = _round_up(size_bytes, _SEGMENT_UNIT_BYTES)
        self._make_room(segment_bytes)
        block = Block(segment_bytes, self._next_address, small)
        self._next_address += segment_bytes
        self.reserved_bytes += segment_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return block

    def _make_room(self, segment_bytes: int) -> None:
        if self._capacity_bytes is None or self.reserved_bytes + segment_bytes <= self._capacity_bytes:
            return
        self.empty_cache()
        if self.reserved_bytes + segment_bytes > self._capacity_bytes:
            raise OutOfMemory(
                f"{segment_bytes} bytes more than {self.reserved_bytes} of {self._capacity_bytes}"
            )

    def _is_split(self, block: Block, size_bytes: int) -> bool:
        left_bytes = block.size_bytes - size_bytes
        if block.small:
            return left_bytes >= _BLOCK_UNIT_BYTES
        splits = self.max_split_bytes is None or size_bytes < self.max_split_bytes
        return splits and left_bytes > _SMALL_BYTES

    def _split(self, block: Block, size_bytes: int) -> None:
        rest = Block(block.size_bytes - size_bytes, block.address + size_bytes, block.small)
        rest.before, rest.after = block, block.after
        if block.after is not None:
            block.after.before = rest
        block.after, block.size_bytes = rest, size_bytes
        self._put_free(rest)

    def _merge(self, block: Block) -> Block:
        if block.before is not None and not block.before.used:
            self._take(block.before)
            block = _joined(block.before, block)
        if block.after is not None and not block.after.used:
            self._take(block.after)
            block = _joined(block, block.after)
        return block

    def _take(self, block: Block) -> None:
        blocks = self._free[block.small]
        del blocks[bisect_left(blocks, (block.size_bytes, block.address))]

    def _put_free(self, block: Block) -> None:
        insort(self._free[block.small], block.entry)


def _joined(left: Block, right: Block) -> Block:
    left.size_bytes += right.size_bytes
    left.after = right.after
    if right.after is not None:
        right.after.before = left
    return left


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
