"""Latencies of many reads: quantiles, and a histogram that a terminal can show."""

from dataclasses import dataclass

import numpy as np

from ple_daemon.gather import Int64Array

STALL_MS = 100.0
_BAR_WIDTH = 50


@dataclass(frozen=True, slots=True)
class LatencySummary:
    """Milliseconds; `stalls` counts reads above `STALL_MS`."""

    count: int
    p50_ms: float
    p99_ms: float
    p999_ms: float
    max_ms: float
    stalls: int


def summarise(latencies_ns: Int64Array) -> LatencySummary:
    """Of at least one latency."""
    millis = latencies_ns / 1e6
    p50, p99, p999 = np.quantile(millis, (0.5, 0.99, 0.999))
    return LatencySummary(
        count=len(millis), p50_ms=float(p50), p99_ms=float(p99), p999_ms=float(p999),
        max_ms=float(millis.max()), stalls=int((millis > STALL_MS).sum()),
    )  # fmt: skip


def octaves(latencies_ns: Int64Array) -> list[tuple[float, float, int]]:
    """(from, to, count) in microseconds, a power of two each, from the fastest read to the slowest."""
    micros = np.maximum(latencies_ns / 1e3, 1.0)
    exponents = np.floor(np.log2(micros)).astype(np.int64)
    counts = np.bincount(exponents)
    first = int(exponents.min())
    return [(2.0**at, 2.0 ** (at + 1), int(counts[at])) for at in range(first, len(counts))]


def histogram(latencies_ns: Int64Array) -> str:
    """A line an octave. The bars are logarithmic: a tail of three reads in a million can still be seen."""
    rows = octaves(latencies_ns)
    scale = _BAR_WIDTH / max(1.0, np.log2(max(count for *_, count in rows) + 1))
    lines = []
    for low, high, count in rows:
        bar = "#" * round(np.log2(count + 1) * scale)
        lines.append(f"{_micros(low):>8} to {_micros(high):>8} {count:>10}  {bar}".rstrip())
    return "\n".join(lines)


def _micros(value: float) -> str:
    if value >= 1e6:
        return f"{value / 1e6:.3g} s"
    return f"{value / 1e3:.3g} ms" if value >= 1e3 else f"{value:.0f} us"
