"""Which pages of a table lie in the page cache, as far as the kernel tells this user."""

import mmap
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit, types

from ple_daemon.gather import Int64Array
from ple_daemon.region import PAGE_BYTES

SAMPLED_PAGES = 4096
_SEED = 20_261_129
_PAGE = mmap.PAGESIZE

_mincore: Any = types.ExternalFunction("mincore", types.int32(types.int64, types.int64, types.int64))


def is_visible(files: Iterable[Path]) -> bool:
    """Whether mincore tells the truth, as it does to owners and writers; others hear that all is resident."""
    return all(path.stat().st_uid == os.geteuid() or os.access(path, os.W_OK) for path in files)


class ResidentSample:
    """The share of a table that is cached, estimated from the same seeded pages each time."""

    def __init__(self, first_address: int, size_bytes: int, files: Iterable[Path]) -> None:
        """`files` are those that the range of addresses maps."""
        pages = np.random.default_rng(_SEED).integers(0, size_bytes // PAGE_BYTES, SAMPLED_PAGES)
        self._addresses = first_address + np.sort(pages) * PAGE_BYTES
        self.is_known = is_visible(files)
        self.share = float("nan")

    def take(self) -> float:
        """Look again; NaN when this user is not told."""
        if self.is_known:
            self.share = count_resident(self._addresses) / len(self._addresses)
        return self.share


def count_resident(addresses: Int64Array) -> int:
    """How many of the mapped pages at `addresses` (multiples of the page size) are cached."""
    return int(resident(addresses).sum())


@njit(nogil=True, cache=True)
def resident(addresses: Int64Array) -> npt.NDArray[np.bool_]:
    """For each page whether it is cached, bool [n]; a page that cannot be asked for counts as not."""
    answer = np.zeros(1, np.uint8)
    found = np.zeros(addresses.size, np.bool_)
    for index in range(addresses.size):
        if _mincore(addresses[index], _PAGE, answer.ctypes.data) == 0:
            found[index] = answer[0] & 1
    return found
