"""Host memory made known to CUDA, so that copies to and from it are asynchronous."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def register(memory: Tensor) -> None:
    """Pin a tensor's memory where it lies. Raises RuntimeError when the driver refuses."""
    error = _cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if error != _cudart().cudaError.success:
        raise RuntimeError(
            f"CUDA does not register {memory.nbytes} bytes of host memory (error {int(error)}): is the "
            "memory limit of this container too small?"
        )


def unregister(memory: Tensor) -> None:
    """Copies out of it must have ended."""
    _cudart().cudaHostUnregister(memory.data_ptr())


def _cudart() -> Any:
    """A module of torch's without types."""
    return torch.cuda.cudart()
