"""Reads that take as long as a bad drive's, or fail: nothing wedges, the metrics tell, health says why."""

import mmap
import re
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from conftest import REAL_WIDTH, Daemon, eventually
from slow_files import SlowFiles, can_mount

from ple_daemon.build import build
from ple_daemon.cold_rows import ColdRows
from ple_daemon.gather import Advice
from ple_daemon.residency import resident
from ple_daemon.source import read_layout
from ple_daemon.table import Table
from ple_rpc.client import ClientOptions, TableClient
from ple_rpc.errors import RowsLost

pytestmark = pytest.mark.skipif(
    not can_mount(), reason="mounting a slow file system needs root and /dev/fuse"
)


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[SlowFiles]:
    source = tmp_path / "source"
    source.mkdir()
    build(REAL_WIDTH.write(tmp_path / "checkpoint"), source / "t.ple")
    try:
        files = SlowFiles(source, tmp_path / "slow")
    except OSError as error:
        pytest.skip(f"mounting is forbidden here: {error}")
    yield files
    files.close()


@pytest.mark.parametrize("delay_s", [0.14, 0.97])
def test_slow_reads_delay_and_do_not_wedge(
    delay_s: float, slow: SlowFiles, tmp_path: Path, start: object, shared_rows: np.ndarray
) -> None:
    """d11: every read takes 140 or 970 ms for a while."""
    daemon: Daemon = start(tmp_path / "slow" / "t.ple", "--drive-probe-interval-s", "0.05").wait_ready()
    assert daemon.health()[1]["state"] == "ready"
    slow.delay_s = delay_s
    ids = np.random.default_rng(1).integers(0, REAL_WIDTH.rows, 16)
    with TableClient(f"unix:{daemon.socket}", ClientOptions(lookup_deadline_s=30.0)) as client:
        start_s = time.monotonic()
        assert client.lookup(ids.tolist()) == shared_rows[ids].tobytes()
        assert delay_s <= time.monotonic() - start_s < 16 * delay_s
        eventually(lambda: daemon.metric("ple_daemon_drive_stalls_total") >= 1, "a stall counted")
        eventually(lambda: daemon.health()[1]["state"] == "degraded", "degraded")
        status, health = daemon.health()
        assert status == 200
        assert re.match(
            r"drive_tail: \d+ of \d+ reads in the last 5 minutes took over 100 ms", health["reasons"][0]
        )
        assert daemon.metric("ple_daemon_drive_read_max_seconds") >= delay_s
        assert daemon.metric('ple_daemon_shm_lookup_seconds_sum{kind="decode"}') >= delay_s
        assert daemon.get("/livez")[0] == 200
        slow.delay_s = 0.0
        more = np.arange(100, 5000, 50)
        assert client.lookup(more.tolist()) == shared_rows[more].tobytes()


def test_a_decode_step_waits_for_one_read_not_sixteen(slow: SlowFiles, tmp_path: Path) -> None:
    """d08: 16 cold rows are read at the same time."""
    delay_s = 0.03
    layout = read_layout(tmp_path / "slow" / "t.ple")
    taken = {}
    for advice in (Advice.PROCESS_MADVISE, Advice.POSIX_FADVISE, Advice.NONE):
        with Table(layout, advice) as table:
            ids = ColdRows([table]).draw(16)
            slow.delay_s = delay_s
            start_s = time.monotonic()
            table.lookup(ids)
            taken[advice] = time.monotonic() - start_s
            slow.delay_s = 0.0
    assert taken[Advice.NONE] >= 16 * delay_s
    assert taken[Advice.PROCESS_MADVISE] < 6 * delay_s
    assert taken[Advice.POSIX_FADVISE] < 6 * delay_s


def test_a_read_that_does_not_come_back_is_seen(slow: SlowFiles, tmp_path: Path) -> None:
    from ple_daemon.decode_gate import DecodeGate
    from ple_daemon.drive_tail import DriveTail

    tail = DriveTail([tmp_path / "slow" / "t.ple"], DecodeGate(), 0.01)
    slow.delay_s = 3.0
    tail.start()
    eventually(lambda: tail.worst_s > 0.2, "the pending read counts", 2.0)
    assert tail.problem is not None
    assert tail.stop(0.01) is False
    assert tail.stop(20) is True
    assert tail.stalls.value == 1


PROMPT = np.arange(500)


def cold_rows_of_the_prompt(path: Path) -> list[int]:
    """Rows of PROMPT on pages that the start of a daemon leaves on the drive, one for each page."""
    with Table(read_layout(path)) as table:  # has read what a daemon reads for the fingerprint
        rows = np.unique(table.hash.row_ids(PROMPT))
        rows = rows[rows * table.layout.row_bytes % mmap.PAGESIZE < mmap.PAGESIZE - table.layout.row_bytes]
        pages, first = np.unique(rows * table.layout.row_bytes // mmap.PAGESIZE, return_index=True)
        cached = resident(table.first_address + pages * mmap.PAGESIZE)
        return rows[first[~cached]].tolist()


@pytest.mark.parametrize("slots", [4, 0], ids=["shared memory", "grpc"])
def test_unreadable_sectors_lose_their_rows_and_nothing_else(
    slots: int, slow: SlowFiles, tmp_path: Path, start: object, shared_rows: np.ndarray
) -> None:
    path = tmp_path / "slow" / "t.ple"
    bad, *good = cold_rows_of_the_prompt(path)[5:25]
    daemon: Daemon = start(path, "--drive-probe-interval-s", "0").wait_ready()
    slow.bad_bytes = range(bad * 320, bad * 320 + 1)
    with TableClient(f"unix:{daemon.socket}", ClientOptions(slots=slots)) as client:
        for ids in ([bad], [*good[:5], bad], [*good * 50, bad, *good]):
            with pytest.raises(RowsLost, match=f"row {bad}"):
                client.lookup(ids)
            assert client.lookup(good) == shared_rows[good].tobytes()
            assert client.lookup(good * 50) == shared_rows[good * 50].tobytes()
        client.prefetch("a", PROMPT.tolist())
        eventually(lambda: daemon.metric("ple_daemon_prefetch_failures_total") == 1, "prefetch given up")
        slow.bad_bytes = range(0)  # a cable that is plugged in again
        assert client.lookup([bad]) == shared_rows[bad].tobytes()
    assert daemon.metric("ple_daemon_read_errors_total") == 3
    eventually(lambda: daemon.health()[1]["state"] == "degraded", "degraded")
    assert daemon.process.poll() is None
