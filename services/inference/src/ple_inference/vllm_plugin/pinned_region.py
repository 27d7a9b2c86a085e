"""Host memory that the GPU copies to and from without stopping this process."""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from ple_inference.vllm_plugin.pinned_pool import check_room
from ple_inference.vllm_plugin.pinning_turn import PinningTurn
from ple_inference.vllm_plugin.registered_memory import register, unregister
from ple_rpc.shared_region import SharedRegion

# Also in the middle of serving, when the daemon was started again: a step waits.
_TURN_DEADLINE_S = 20.0


class PinnedRegion:
    """Registers a region with CUDA, so that copies out of it are asynchronous. One at a time per region."""

    def __init__(self, region: SharedRegion) -> None:
        """Raises RuntimeError when the driver refuses."""
        self.region = region
        # The client closes its region when a session ends, which the stream may not have noticed. A tensor
        # does not keep a buffer from that, a view of it does.
        self._hold = memoryview(region.buffer)
        self.bytes = torch.frombuffer(region.buffer, dtype=torch.uint8)
        """uint8, all of the region."""
        with PinningTurn("the memory shared with the daemon", deadline_s=_TURN_DEADLINE_S):
            check_room(self.bytes.nbytes, "the memory shared with the daemon")
            register(self.bytes)

    def close(self) -> None:
        """Copies out of the region must have ended, and nobody may use `bytes` any more."""
        unregister(self.bytes)
        self._hold.release()


def pinned(size: int, dtype: torch.dtype) -> Tensor:
    """New pinned memory of this process, [size]."""
    return torch.empty(size, dtype=dtype, device="cpu", pin_memory=True)


def launch_host_function(function: int, argument: int) -> None:
    """Have the current stream call native code, address and argument, before what it is given next.

    The function must call nothing of CUDA. Raises RuntimeError.
    """
    stream = torch.cuda.current_stream().cuda_stream
    error = _driver().cuLaunchHostFunc(
        ctypes.c_void_p(stream), ctypes.c_void_p(function), ctypes.c_void_p(argument)
    )
    if error:
        raise RuntimeError(f"CUDA does not call host functions (error {error})")


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
