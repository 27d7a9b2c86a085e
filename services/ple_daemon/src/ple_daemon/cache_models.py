"""Kernels that replay row accesses against models of a cache, and count the pages that a drive must read.

Rows and pages are dense numbers (0, 1, ... in order of first use), so that a model is a few flat arrays. A
model is the kernel's page cache (LRU of pages), and before it nothing, an LRU of rows, or a set of rows
chosen once.
"""

import enum
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from ple_daemon.gather import Int64Array

Int32Array = npt.NDArray[np.int32]

_EMPTY = -1
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class RowCache(enum.IntEnum):
    """What stands before the page cache."""

    NONE = 0
    LRU = 1
    STATIC = 2


class Interner:
    """Gives dense numbers to 64-bit keys, in order of first use."""

    def __init__(self) -> None:
        self.count = 0
        self._slots = np.full(1 << 16, _EMPTY, np.int32)
        self._keys = np.zeros(1 << 15, np.int64)

    @property
    def keys(self) -> Int64Array:
        """The key of each number, int64 [count]."""
        return self._keys[: self.count]

    def intern(self, keys: Int64Array) -> Int32Array:
        """Numbers of `keys`, int32 of the same length."""
        needed = self.count + len(keys)
        if needed > len(self._keys):
            self._grow(needed)
        numbers = np.zeros(len(keys), np.int32)
        self.count = _intern(keys, self._slots, self._keys, self.count, numbers)
        return numbers

    def _grow(self, needed: int) -> None:
        size = 1 << int(needed - 1).bit_length()
        grown = np.zeros(size, np.int64)
        grown[: self.count] = self.keys
        self._keys = grown
        self._slots = np.full(2 * size, _EMPTY, np.int32)
        _rehash(self._slots, self._keys, self.count)


@njit(nogil=True, cache=True)
def _slot(slots: Int32Array, keys: Int64Array, key: int) -> int:
    """Where `key` stands or would stand; the number of slots is a power of two."""
    mask = slots.size - 1
    at = np.int64((np.uint64(key) * _GOLDEN) >> np.uint64(20)) & mask
    while slots[at] != _EMPTY and keys[slots[at]] != key:
        at = (at + 1) & mask
    return int(at)


@njit(nogil=True, cache=True)
def _intern(keys: Int64Array, slots: Int32Array, known: Int64Array, count: int, numbers: Int32Array) -> int:
    for index in range(keys.size):
        at = _slot(slots, known, keys[index])
        if slots[at] == _EMPTY:
            known[count] = keys[index]
            slots[at] = count
            count += 1
        numbers[index] = slots[at]
    return count


@njit(nogil=True, cache=True)
def _rehash(slots: Int32Array, known: Int64Array, count: int) -> None:
    for number in range(count):
        slots[_slot(slots, known, known[number])] = number


@njit(nogil=True, cache=True)
def replay(
    rows: Int32Array,
    pages: Int32Array,
    row_cache: int,
    row_capacity: int,
    chosen: npt.NDArray[np.bool_],
    page_capacity: int,
    cold: npt.NDArray[np.uint8],
) -> None:
    """Replay `rows`, int32 [tokens, heads]; `cold`, uint8 [tokens], gets the pages each token has to read.

    `pages`, int32 [distinct rows, 2], holds the first and last page of each row (the same when it does not
    straddle); `chosen`, bool [distinct rows], is the static set.
    """
    row_links = np.zeros((pages.shape[0] + 1, 2), np.int32)
    page_links = np.zeros((pages.max() + 2, 2), np.int32)
    row_links[:] = _EMPTY
    page_links[:] = _EMPTY
    row_count = page_count = 0
    for token in range(rows.shape[0]):
        for head in range(rows.shape[1]):
            row = rows[token, head]
            if row_cache == 2 and chosen[row]:
                continue
            if row_cache == 1:
                hit, row_count = _touch(row_links, row, row_count, row_capacity)
                if hit:
                    continue
            for side in range(2 if pages[row, 0] != pages[row, 1] else 1):
                hit, page_count = _touch(page_links, pages[row, side], page_count, page_capacity)
                if not hit:
                    cold[token] += 1


@njit(nogil=True, cache=True)
def _touch(links: Any, item: int, count: int, capacity: int) -> tuple[bool, int]:
    """Use `item` of an LRU list; whether it was there, and the list's new length.

    `links` [items + 1, (newer, older)] is a ring through its last entry, whose older neighbour is the newest.
    """
    if capacity == 0:
        return False, 0
    root = links.shape[0] - 1
    if links[root, 0] == _EMPTY:
        links[root, 0] = links[root, 1] = root
    hit = links[item, 0] != _EMPTY
    if hit:
        _unlink(links, item)
    elif count == capacity:
        _unlink(links, links[root, 0])
    else:
        count += 1
    newest = links[root, 1]
    links[item, 0] = root
    links[item, 1] = newest
    links[newest, 0] = item
    links[root, 1] = item
    return hit, count


@njit(nogil=True, cache=True)
def _unlink(links: Any, item: int) -> None:
    newer, older = links[item, 0], links[item, 1]
    links[newer, 1] = older
    links[older, 0] = newer
    links[item, 0] = links[item, 1] = _EMPTY
