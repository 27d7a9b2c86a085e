"""The probe of the drive's tail, the resident share, and what the metrics say when they cannot know."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import REAL_WIDTH, Daemon, eventually

from ple_daemon.cold_rows import ColdRows
from ple_daemon.decode_gate import DecodeGate
from ple_daemon.drive_tail import WINDOW_S, DriveTail
from ple_daemon.health import Health, State
from ple_daemon.region import PAGE_BYTES
from ple_daemon.residency import ResidentSample, count_resident, is_visible
from ple_daemon.source import open_table


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    return path


def test_stalls_are_a_problem_for_some_minutes(file: Path) -> None:
    clock, seen = Clock(), []
    tail = DriveTail([file], DecodeGate(), 1.0, seen.append, clock)
    assert math.isnan(tail.worst_s)
    for seconds in (0.001, 0.0999, 0.002):
        tail.record(seconds)
    assert (tail.problem, tail.worst_s) == (None, 0.0999)
    clock.now_s += 100
    tail.record(0.14)
    tail.record(0.97)
    assert tail.problem == (
        "drive_tail: 2 of 5 reads in the last 5 minutes took over 100 ms, the worst 970 ms"
    )
    clock.now_s += WINDOW_S - 99
    assert tail.worst_s == 0.97
    clock.now_s += 100
    assert tail.problem is None
    assert math.isnan(tail.worst_s)
    assert (tail.stalls.value, seen) == (2, [0.001, 0.0999, 0.002, 0.14, 0.97])
    assert tail.stop(1)


def test_probing_gives_way_to_decode_lookups_and_stops(file: Path) -> None:
    gate, seen = DecodeGate(), []
    tail = DriveTail([file], gate, 0.001, seen.append)
    with gate:
        tail.start()
        assert seen == []
    eventually(lambda: len(seen) >= 3, "probe reads")
    assert tail.problem is None or max(seen) > 0.1
    assert tail.stop(10)
    before = len(seen)
    assert tail.stop(10)
    assert len(seen) == before


def test_no_probe_in_memory_or_when_switched_off(file: Path) -> None:
    assert DriveTail([file], DecodeGate(), 0.0).refusal == "switched off"
    shm = Path("/dev/shm") / f"ple-test-{os.getpid()}"
    shm.write_bytes(bytes(PAGE_BYTES))
    try:
        tail = DriveTail([shm], DecodeGate(), 1.0)
        assert "there is no drive to read" in tail.refusal
        tail.start()
        assert tail.stop(1)
    finally:
        shm.unlink()


def test_a_problem_that_is_over_degrades_no_more() -> None:
    health = Health()
    health.enter(State.READY)
    assert health.report("drive_tail", "slow") is True
    assert health.state is State.DEGRADED
    assert health.clear("drive_tail") is True
    assert health.clear("drive_tail") is False
    assert health.state is State.READY


def test_resident_share_follows_the_cache(tmp_path: Path) -> None:
    with open_table(REAL_WIDTH.write(tmp_path / "own")) as table:
        files = sorted({segment.path for segment in table.layout.segments})
        sample = ResidentSample(table.first_address, table.size_bytes, files)
        assert math.isnan(sample.share)
        ColdRows([table]).evict()
        low = sample.take()
        table.lookup(np.arange(table.layout.rows))
        assert low < 0.2
        assert sample.take() > 0.9
        assert sample.share > 0.9
        addresses = table.first_address + np.arange(5) * PAGE_BYTES
        assert count_resident(addresses) == 5


def test_others_are_not_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "foreign"
    file.write_bytes(b"x")
    file.chmod(0o444)
    assert is_visible([file])
    monkeypatch.setattr(os, "geteuid", lambda: file.stat().st_uid + 1)
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert not is_visible([file])
    assert math.isnan(ResidentSample(0, PAGE_BYTES, [file]).take())


def test_metrics_of_a_daemon(start: Callable[..., Daemon], shared_checkpoint: Path) -> None:
    daemon = start(
        shared_checkpoint, "--drive-probe-interval-s", "0.01", "--resident-interval-s", "0.05"
    ).wait_ready()
    eventually(lambda: daemon.metric("ple_daemon_drive_read_seconds_count") >= 3, "probe reads")
    assert 0 < daemon.metric("ple_daemon_drive_read_max_seconds") < 60
    assert 0 < daemon.metric("ple_daemon_resident_share") <= 1
    assert daemon.metric("ple_daemon_page_table_bytes") > 0
    assert 'resident_share="known"' in daemon.get("/metrics")[1]


def test_unknown_figures_are_nan(start: Callable[..., Daemon], shared_checkpoint: Path) -> None:
    daemon = start(shared_checkpoint, "--drive-probe-interval-s", "0").wait_ready()
    assert math.isnan(daemon.metric("ple_daemon_drive_read_max_seconds"))
    assert 'probe="switched off"' in daemon.get("/metrics")[1]
    assert "drive probe off reason=switched off" in daemon.log
    assert json.loads(daemon.get("/readyz")[1])["state"] == "ready"
