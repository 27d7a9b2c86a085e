"""What 1.1 GiB of pinned memory takes of the machine: PyTorch's own, and a pool of exactly that size."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

SIZE_BYTES = 1_181_116_006  # 1.1 GiB, and no whole number of pages


def run(settings: dict[str, Any]) -> dict[str, Any]:
    """For each way: bytes that the process and the machine have less afterwards, and the speed of copies."""
    import torch

    from ple_inference.vllm_plugin.pinned_pool import PinnedPool

    size_bytes = int(settings.get("size_bytes", SIZE_BYTES))
    device = torch.empty(size_bytes, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    found: dict[str, Any] = {"size_bytes": size_bytes}

    before = _taken()
    with PinnedPool(size_bytes, "a test") as pool:
        found["pool"] = _findings(pool.bytes, device, before)
    after = _taken()
    found["pool"]["left_resident_bytes"] = after["resident_bytes"] - before["resident_bytes"]

    before = _taken()
    tensor = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
    found["torch"] = _findings(tensor, device, before)
    found["torch"]["allocator_bytes"] = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    found["waste_bytes"] = {way: found[way]["resident_bytes"] - size_bytes for way in ("pool", "torch")}
    return found


def _findings(host: Any, device: Any, before: dict[str, int]) -> dict[str, Any]:
    import torch

    host.fill_(1)  # every page is there
    taken = {name: value - before[name] for name, value in _taken().items()}
    seconds = []
    for _ in range(5):
        start_s = time.monotonic()
        device.copy_(host, non_blocking=True)
        returned_s = time.monotonic() - start_s
        torch.cuda.synchronize()
        seconds.append(time.monotonic() - start_s)
    return {
        **taken,
        "is_pinned": host.is_pinned(),
        "copy_gb_per_s": round(host.nbytes / sorted(seconds)[2] / 1e9, 1),
        "call_returned_after_s": round(returned_s, 6),
    }


def _taken() -> dict[str, int]:
    """Of this process, and of the machine; the latter is shared with whatever else runs."""
    status = dict(
        line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line
    )
    memory = Path("/proc/meminfo").read_text()
    available_kib = next(line for line in memory.splitlines() if line.startswith("MemAvailable")).split()[1]
    return {
        "resident_bytes": int(status["VmRSS"].split()[0]) * 1024,
        "pinned_bytes": int(status["VmPin"].split()[0]) * 1024,
        "locked_bytes": int(status["VmLck"].split()[0]) * 1024,
        "machine_bytes": -int(available_kib) * 1024,
    }
