"""Pinned memory of exactly the size that is asked for: PyTorch's own rounds up to a power of two."""

from __future__ import annotations

import mmap
from types import TracebackType

import torch
from torch import Tensor

from ple_inference.host_ram import available_bytes
from ple_inference.vllm_plugin.pinning_turn import PinningTurn
from ple_inference.vllm_plugin.registered_memory import register, unregister

_GIB = 2**30
# What pinning leaves of the machine's RAM, or as much as it takes: what is pinned cannot be taken back.
_RESERVE_BYTES = _GIB
# From here on the kernel is asked for huge pages: it then makes fewer than a hundredth of the pages.
_HUGE_FROM_BYTES = 64 * 2**20


class NotEnoughRam(RuntimeError):
    """More was to be pinned than the machine or the container has left."""


class PinnedPool:
    """An anonymous mapping that CUDA has registered. Ends with `close`, or with the process."""

    def __init__(self, size_bytes: int, purpose: str) -> None:
        """One rank of the machine at a time checks and pins. Raises NotEnoughRam, TurnTaken, RuntimeError."""
        if size_bytes < 1:
            raise ValueError(f"a pool of {size_bytes} bytes for {purpose}")
        with PinningTurn(f"{size_bytes} bytes for {purpose}"):
            check_room(size_bytes, purpose)
            self._mapping = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if size_bytes >= _HUGE_FROM_BYTES:
                self._mapping.madvise(mmap.MADV_HUGEPAGE)
            self.bytes: Tensor = torch.frombuffer(self._mapping, dtype=torch.uint8)
            """uint8 [size_bytes]. A tensor does not keep the mapping from being unmapped."""
            try:
                register(self.bytes)
            except RuntimeError:
                self._mapping.close()
                raise

    def close(self) -> None:
        """Copies must have ended, and nobody may use `bytes` any more."""
        if self._mapping.closed:
            return
        unregister(self.bytes)
        self._mapping.close()

    def __enter__(self) -> PinnedPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check_room(size_bytes: int, purpose: str) -> None:
    """Raises NotEnoughRam, with the sizes."""
    available = available_bytes()
    if available < size_bytes + min(size_bytes, _RESERVE_BYTES):
        raise NotEnoughRam(
            f"{purpose} needs {size_bytes / _GIB:.2f} GiB of pinned RAM and {available / _GIB:.2f} GiB are "
            "available to this process, of which some must be left: free some, or raise the container's limit"
        )
