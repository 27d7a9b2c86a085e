"""What a CUDA graph's wait for an external event waits for: the record before its launch, and no later one.

The plugin relies on both. Were it the latest record when the wait is reached, a step could wait for the
rows of the step after it, which waits for the step.
"""

from __future__ import annotations

import time
from typing import Any

import torch

HOLD_S = 0.4


def run(settings: dict[str, Any]) -> dict[str, Any]:
    del settings
    event, side = torch.cuda.Event(external=True), torch.cuda.Stream()
    event.record()  # or PyTorch has not made it, and captures no wait
    source, copy = torch.zeros(1, device="cuda"), torch.zeros(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        event.wait()
        copy.copy_(source)
    hold = _hold(HOLD_S)

    found: dict[str, Any] = {}
    with torch.cuda.stream(side):
        hold()
        source.fill_(7)
        event.record(side)
    graph.replay()
    torch.cuda.synchronize()
    found["waits_for_the_record_before"] = copy.item() == 7

    begin_s = time.perf_counter()
    hold()  # so that the graph has not begun when the event is recorded again
    graph.replay()
    ended = torch.cuda.Event()
    ended.record()
    with torch.cuda.stream(side):
        for _ in range(4):
            hold()
        event.record(side)
    ended.synchronize()
    found["ended_after_s"] = time.perf_counter() - begin_s
    found["later_records_do_not_count"] = found["ended_after_s"] < 2 * HOLD_S
    torch.cuda.synchronize()
    return found


def _hold(seconds: float) -> Any:
    """Something that keeps a stream busy for so long."""
    cycles = 50_000_000
    torch.cuda._sleep(cycles)
    torch.cuda.synchronize()
    begin_s = time.perf_counter()
    torch.cuda._sleep(cycles)
    torch.cuda.synchronize()
    needed = int(cycles * seconds / (time.perf_counter() - begin_s))
    return lambda: torch.cuda._sleep(needed)
