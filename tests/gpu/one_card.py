"""Pipeline stages that share one card, where a machine has no other: each is a process with its own memory.

NCCL refuses two ranks of one card on one host, so each stage says that it is a host of its own, and what
passes between stages goes through sockets. Such stages are slow: nothing timed here means anything.
"""

from __future__ import annotations

import os
from typing import Any

SHARED = "TRIPLEX_TEST_ONE_CARD"
ENVIRONMENT = {SHARED: "1", "NCCL_SOCKET_IFNAME": "lo"}
# What each stage may take, and its K/V in bytes, since its neighbour comes and goes as it measures.
ARGUMENTS = {
    "distributed_executor_backend": "mp",
    "gpu_memory_utilization": 0.4,
    "kv_cache_memory_bytes": 4 << 30,
}


def is_shared() -> bool:
    return bool(os.environ.get(SHARED))


def share() -> None:
    """In a worker's process, before its device is there."""
    from vllm.v1.worker.gpu_worker import Worker

    init_device = Worker.init_device

    def init_shared_device(worker: Any) -> None:
        os.environ["NCCL_HOSTID"] = f"stage {worker.rank}"
        worker.local_rank = 0
        init_device(worker)

    Worker.init_device = init_shared_device
