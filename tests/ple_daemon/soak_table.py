"""A table whose rows follow from their numbers: a client can check what it gets without the table."""

from dataclasses import dataclass

import numpy as np
from ple_checkpoint import Checkpoint

ROW_BYTES = 320
_WORDS = ROW_BYTES // 8


def rows_of(ids: np.ndarray) -> np.ndarray:
    """uint8 [len(ids), 320]. Words are splitmix64, a bijection, of their numbers: no two are equal."""
    words = ids.astype(np.uint64)[:, None] * np.uint64(_WORDS) + np.arange(_WORDS, dtype=np.uint64)
    words *= np.uint64(0x9E3779B97F4A7C15)
    words ^= words >> np.uint64(30)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words.view(np.uint8)


@dataclass
class DerivedRows(Checkpoint):
    """31 MiB in four shards and three files."""

    width: int = ROW_BYTES // 2
    base: int = 6000

    def table(self) -> np.ndarray:
        return rows_of(np.arange(self.rows))
