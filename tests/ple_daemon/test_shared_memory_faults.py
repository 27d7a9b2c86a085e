"""The shared-memory plane when the daemon stops, hangs or restarts, and when its files go bad."""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import DEADLINE_S, REAL_WIDTH, Daemon, eventually
from ple_checkpoint import Checkpoint

from ple_daemon.source import read_layout
from ple_rpc.client import ClientOptions, TableClient
from ple_rpc.errors import RowsLost, TableChanged

Start = Callable[..., Daemon]
FAST = ClientOptions(hang_check_s=0.3, call_deadline_s=1.0, backoff_max_s=0.1)


def attached(daemon: Daemon) -> TableClient:
    client = TableClient(f"unix:{daemon.socket}", FAST)
    client.wait_ready(DEADLINE_S)
    assert client.region is not None
    return client


class Reader(threading.Thread):
    """Looks rows up until told to stop; keeps what was wrong."""

    def __init__(self, client: TableClient, rows: np.ndarray) -> None:
        super().__init__(daemon=True)
        self.client, self.rows = client, rows
        self.done, self.wrong = 0, []
        self.stop = threading.Event()
        self.start()

    def run(self) -> None:
        rng = np.random.default_rng(3)
        while not self.stop.is_set():
            ids = rng.integers(0, len(self.rows), (16, 700)[self.done % 2])
            try:
                if self.client.lookup(ids) != self.rows[ids].tobytes():
                    self.wrong.append(ids)
            except Exception as error:
                self.wrong.append(error)
            self.done += 1

    def end(self) -> None:
        self.stop.set()
        self.join(DEADLINE_S)
        assert not self.is_alive()
        assert self.wrong == []


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_lookups_go_on_across_restarts(
    start: Start, shared_checkpoint: Path, shared_rows: np.ndarray, how: signal.Signals
) -> None:
    daemon = start(shared_checkpoint).wait_ready()
    with attached(daemon) as client:
        reader = Reader(client, shared_rows)
        for _ in range(2):
            eventually(lambda done=reader.done: reader.done > done + 20, "lookups")
            region = client.region
            daemon.signal(how)
            daemon.wait()
            daemon = start(shared_checkpoint).wait_ready()
            eventually(lambda done=reader.done: reader.done > done + 20, "lookups after the restart")
            assert client.region is not None
            assert client.region is not region, "an old daemon could still write to the old region"
        reader.end()
        assert client.stats.lookups_failed == 0


def test_a_daemon_that_hangs_is_noticed_and_waited_for(
    start: Start, shared_checkpoint: Path, shared_rows: np.ndarray
) -> None:
    daemon = start(shared_checkpoint).wait_ready()
    with attached(daemon) as client:
        reader = Reader(client, shared_rows)
        eventually(lambda: reader.done > 20, "lookups")
        daemon.signal(signal.SIGSTOP)
        try:
            eventually(lambda: client.stats.waiting_since is not None, "the wait shows")
        finally:
            daemon.signal(signal.SIGCONT)
        eventually(lambda done=reader.done: reader.done > done + 20, "lookups afterwards")
        reader.end()
        assert client.stats.waiting_since is None


def test_another_table_after_a_restart_is_refused(start: Start, tmp_path: Path) -> None:
    one, other = REAL_WIDTH, Checkpoint(width=160, base=2000, seed=8)
    for name, checkpoint in (("one", one), ("other", other)):
        (tmp_path / name).mkdir()
        checkpoint.write(tmp_path / name)
    daemon = start(tmp_path / "one").wait_ready()
    with attached(daemon) as client:
        client.lookup([1])
        daemon.signal(signal.SIGKILL)
        daemon.wait()
        start(tmp_path / "other").wait_ready()
        with pytest.raises(TableChanged):
            client.lookup([1])


@pytest.mark.parametrize("count", [16, 2000])
def test_a_truncated_file_loses_its_rows_and_nothing_else(
    start: Start, tmp_path: Path, shared_rows: np.ndarray, count: int
) -> None:
    folder = REAL_WIDTH.write(tmp_path)
    # The watch is off, so that the read itself has to find out.
    daemon = start(folder, "--watch-interval-s", "3600").wait_ready()
    segment = read_layout(folder).segments[-1]
    with attached(daemon) as client:
        os.truncate(segment.path, segment.offset_bytes)
        with pytest.raises(RowsLost, match="row 3"):
            client.lookup(np.arange(len(shared_rows) - count, len(shared_rows)))
        with pytest.raises(TableChanged):  # the read error made the daemon look at its files
            eventually(lambda: client.lookup([0]) == b"", "refusal")
        assert client.stats.reconnects == 0
    assert daemon.process.poll() is None
    eventually(lambda: daemon.health()[1]["state"] == "degraded", "degraded")
    assert daemon.metric("ple_daemon_read_errors_total") >= 1
    assert daemon.metric('ple_daemon_shm_lookups_total{kind="%s",outcome="data_loss"}'
                         % ("decode" if count == 16 else "bulk")) == 1  # fmt: skip
