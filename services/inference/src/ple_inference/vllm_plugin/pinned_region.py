"""Host memory that the GPU copies to and from without stopping this process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ple_rpc.shared_region import SharedRegion


class PinnedRegion:
    """Registers a region with CUDA, so that copies out of it are asynchronous. One at a time per region."""

    def __init__(self, region: SharedRegion) -> None:
        """Raises RuntimeError when the driver refuses."""
        self.region = region
        self.bytes = torch.frombuffer(region.buffer, dtype=torch.uint8)
        """uint8, all of the region. Keeps it mapped."""
        error = _cudart().cudaHostRegister(self.bytes.data_ptr(), self.bytes.nbytes, 0)
        if error != _cudart().cudaError.success:
            raise RuntimeError(
                f"CUDA does not register {self.bytes.nbytes} bytes of shared memory (error {int(error)}): "
                "is the memory limit of this container too small?"
            )

    def close(self) -> None:
        """Copies out of the region must have ended."""
        _cudart().cudaHostUnregister(self.bytes.data_ptr())


def pinned(size: int, dtype: torch.dtype) -> Tensor:
    """New pinned memory of this process, [size]."""
    return torch.empty(size, dtype=dtype, device="cpu", pin_memory=True)


def _cudart() -> Any:
    """A module of torch's without types."""
    return torch.cuda.cudart()
