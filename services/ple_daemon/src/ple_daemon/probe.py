"""Tests whether a drive suits the table: random reads per second by depth, and the tail of one read.

Lookups of a decode step wait for the slowest of 16 reads, so the verdict looks at the tail first; a cold
prompt needs 16 pages a token, so it looks at pages per second next.
"""

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from ple_daemon.drive_reads import DirectFile, Reads, refuse_memory
from ple_daemon.drive_scratch import scratch_file
from ple_daemon.errors import DaemonError
from ple_daemon.gather import Int64Array
from ple_daemon.latency import STALL_MS, LatencySummary, histogram, summarise

DEPTHS = (1, 2, 4, 8, 16, 32, 64, 128)
PAGES_PER_TOKEN = 16
MIN_FILE_BYTES = 64 * 1024 * 1024

# What a verdict needs: (suits, at least borderline). docs/daemon.md says where the figures come from.
PAGES_PER_S = (30_000.0, 10_000.0)
P99_MS = (1.0, 5.0)
STALLS_PER_MINUTE = (0.0, 2.0)

_DEPTH_S = 1.0
_SLICE_S = 0.5
_SLICE_READS = 1 << 20
# Below this share of blocks on the drive, reads of holes would be measured instead of the drive.
_MIN_ALLOCATED = 0.98
_SECONDS_BAR = "{desc}: {bar}| {n:.0f}/{total:.0f} s"
_VERDICTS = ("suits", "borderline", "unsuitable")


@dataclass(frozen=True, slots=True)
class Probe:
    """What was measured: reads per second by depth, and the latencies of one read at a time."""

    path: str
    scratch: bool
    reads_per_s: dict[int, float]
    seconds: float
    latencies_ns: Int64Array

    @property
    def summary(self) -> LatencySummary:
        return summarise(self.latencies_ns)

    @property
    def best_reads_per_s(self) -> float:
        return max(self.reads_per_s.values())

    @property
    def reasons(self) -> list[tuple[int, str]]:
        """(grade, sentence) of each criterion; the grade is an index of suits, borderline, unsuitable."""
        summary, best = self.summary, self.best_reads_per_s
        stalls = summary.stalls * 60 / self.seconds
        return [
            (
                _grade(-best, tuple(-bound for bound in PAGES_PER_S)),
                f"{best:,.0f} random pages/s at best: {best / PAGES_PER_TOKEN:,.0f} cold prompt tokens/s",
            ),
            (_grade(summary.p99_ms, P99_MS), f"p99 of one read is {summary.p99_ms:.3f} ms"),
            (
                _grade(stalls, STALLS_PER_MINUTE),
                f"reads above {STALL_MS:.0f} ms: {summary.stalls}, the slowest took {summary.max_ms:.1f} ms",
            ),
        ]

    @property
    def verdict(self) -> str:
        return _VERDICTS[max(grade for grade, _ in self.reasons)]

    def as_text(self) -> str:
        summary = self.summary
        what = "a scratch file on " if self.scratch else ""
        lines = [f"random 4 KiB reads of {what}{self.path}, O_DIRECT", "", "depth    reads/s"]
        lines += [f"{depth:>5} {rate:>10,.0f}" for depth, rate in self.reads_per_s.items()]
        lines += [
            "",
            f"one read at a time for {self.seconds:.0f} s: {summary.count:,} reads",
            f"  p50 {summary.p50_ms:.3f} ms, p99 {summary.p99_ms:.3f} ms, p99.9 {summary.p999_ms:.3f} ms",
            f"  max {summary.max_ms:.3f} ms (bars are logarithmic)",
            histogram(self.latencies_ns),
            "",
            f"verdict: {self.verdict}",
        ]
        lines += [f"  {_VERDICTS[grade]:<11} {sentence}" for grade, sentence in self.reasons]
        return "\n".join(lines)

    def as_json(self) -> str:
        return json.dumps(
            {
                "path": self.path,
                "scratch": self.scratch,
                "reads_per_s": {str(depth): round(rate, 1) for depth, rate in self.reads_per_s.items()},
                "latency": {"seconds": round(self.seconds, 3), **dataclasses.asdict(self.summary)},
                "verdict": self.verdict,
                "reasons": [
                    {"grade": _VERDICTS[grade], "reason": sentence} for grade, sentence in self.reasons
                ],
            },
            indent=1,
        )


def probe(path: Path, seconds: float, scratch_bytes: int) -> Probe:
    """Test the drive under `path`: a file is read as it is, in a folder a scratch file is made.

    Raises DaemonError for what cannot be tested.
    """
    with _subject(path, scratch_bytes) as subject, DirectFile(subject) as file:
        rng = np.random.default_rng()
        rates = {}
        for depth in tqdm(DEPTHS, desc="depths", leave=False):
            offsets = file.random_offsets(rng, _SLICE_READS)
            rates[depth] = file.read(offsets, depth, min(_DEPTH_S, seconds)).per_second
        parts = list(_one_at_a_time(file, rng, seconds))
    return Probe(
        path=str(path),
        scratch=subject != path,
        reads_per_s=rates,
        seconds=sum(part.seconds for part in parts),
        latencies_ns=np.concatenate([part.latencies_ns for part in parts]),
    )


def _one_at_a_time(file: DirectFile, rng: np.random.Generator, seconds: float) -> Iterator[Reads]:
    """Short slices, so that the bar moves and Ctrl-C is heard."""
    with tqdm(total=seconds, desc="latency", leave=False, bar_format=_SECONDS_BAR) as bar:
        left_s = seconds
        while left_s > 0:
            part = file.read(file.random_offsets(rng, _SLICE_READS // 8), 1, min(_SLICE_S, left_s))
            yield part
            bar.update(min(part.seconds, left_s))
            left_s -= part.seconds


@contextmanager
def _subject(path: Path, scratch_bytes: int) -> Iterator[Path]:
    if path.is_dir():
        if scratch_bytes < MIN_FILE_BYTES:
            raise DaemonError(
                f"{path}: a scratch file of {scratch_bytes:,} bytes, the drive's own cache would answer; "
                "choose a larger --size-gib"
            )
        refuse_memory(path)  # before gigabytes are written there
        with scratch_file(path, scratch_bytes) as scratch:
            yield scratch
        return
    if not path.is_file():
        raise DaemonError(
            f"{path}: neither a file nor a folder; name a file on the drive or a folder to write into"
        )
    status = path.stat()
    if status.st_size < MIN_FILE_BYTES:
        raise DaemonError(
            f"{path}: only {status.st_size:,} bytes, the drive's own cache would answer; "
            "name a larger file or a folder"
        )
    if status.st_blocks * 512 < status.st_size * _MIN_ALLOCATED:
        raise DaemonError(
            f"{path}: a sparse file, its holes are not on the drive; name another file or a folder"
        )
    yield path


def _grade(value: float, bounds: tuple[float, ...]) -> int:
    return sum(value > bound for bound in bounds)
