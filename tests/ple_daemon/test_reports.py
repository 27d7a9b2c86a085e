"""Public reports of what went wrong elsewhere, as tests: those that no other file here covers.

docs/daemon.md lists all; `grep -rn d07 tests` finds one.
"""

import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import REAL_WIDTH, Daemon, eventually

from ple_daemon.build import build
from ple_daemon.cold_rows import ColdRows
from ple_daemon.source import open_table
from ple_rpc.client import ClientOptions, TableClient
from ple_rpc.errors import TableUnavailable

Start = Callable[..., Daemon]


def identity(path: Path) -> tuple[int, int, int, int]:
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def test_d12_every_way_to_start_has_a_defined_result(
    start: Start, tmp_path: Path, run_dir: Path, shared_rows: np.ndarray
) -> None:
    """As one client sees it: no daemon, one refused its table, a table, kill -9 amid a prefetch, a table."""
    path, sidecar = tmp_path / "t.ple", tmp_path / "t.ple.json"
    build(REAL_WIDTH.write(tmp_path / "checkpoint"), path)
    right = sidecar.read_text()
    sidecar.write_text(right.replace('"fingerprint": "', '"fingerprint": "00', 1))
    options = ClientOptions(lookup_deadline_s=0.5, hang_check_s=0.2)
    with TableClient(f"unix:{run_dir / 'table.sock'}", options) as client:
        with pytest.raises(TableUnavailable):
            client.lookup([1])
        refused = start(path)
        assert refused.wait() == 1
        assert refused.log.splitlines()[-1] == (
            f"ple-daemon: {path}: its content is not what its description says; build it again"
        )
        with pytest.raises(TableUnavailable):
            client.lookup([1])
        sidecar.write_text(right)
        daemon = start(path).wait_ready()
        assert client.lookup([1]) == shared_rows[1].tobytes()
        for number in range(4):
            client.prefetch(str(number), range(200_000))
        eventually(lambda: daemon.metric("ple_daemon_prefetch_active") > 0, "prefetch")
        daemon.signal(signal.SIGKILL)
        daemon.wait()
        daemon = start(path).wait_ready()
        assert client.lookup(range(2000)) == shared_rows[:2000].tobytes()
        assert daemon.metric("ple_daemon_prefetch_queue") == 0, "hints die with the daemon"


def test_d17_a_restart_writes_nothing(start: Start, tmp_path: Path, shared_rows: np.ndarray) -> None:
    folder = tmp_path / "table"
    folder.mkdir()
    build(REAL_WIDTH.write(tmp_path / "checkpoint"), folder / "t.ple")
    start(folder / "t.ple").wait_ready().close()  # compiles kernels, if nobody did
    before = {path: identity(path) for path in folder.iterdir()}
    for _ in range(2):
        daemon = start(folder / "t.ple").wait_ready()
        with TableClient(f"unix:{daemon.socket}") as client:
            assert client.lookup(range(2000)) == shared_rows[:2000].tobytes()
        counters = Path(f"/proc/{daemon.process.pid}/io").read_text()
        written = int(counters.split("\nwrite_bytes: ")[1].split()[0])
        assert written < 256 * 1024, counters  # its log, and nothing of the table's 10 MiB
        daemon.close()
    assert before == {path: identity(path) for path in folder.iterdir()}


def test_d17_a_read_only_table_is_served(start: Start, tmp_path: Path, shared_rows: np.ndarray) -> None:
    folder = REAL_WIDTH.write(tmp_path / "checkpoint")
    for path in folder.iterdir():
        path.chmod(0o444)
    folder.chmod(0o555)
    try:
        with TableClient(f"unix:{start(folder).wait_ready().socket}") as client:
            assert client.lookup([9]) == shared_rows[9].tobytes()
    finally:
        folder.chmod(0o755)


def test_d18_the_daemon_holds_no_gpu_context(start: Start, shared_checkpoint: Path) -> None:
    daemon = start(shared_checkpoint).wait_ready()
    process = Path(f"/proc/{daemon.process.pid}")
    maps = (process / "maps").read_text()
    assert not [name for name in ("libcuda", "libnvidia", "libtorch", "libamdhip") if name in maps]
    devices = [str(fd.readlink()) for fd in (process / "fd").iterdir()]
    assert not [name for name in devices if name.startswith(("/dev/nvidia", "/dev/kfd", "/dev/dri"))]


def test_d06_rows_come_back_after_others_took_the_cache(tmp_path: Path, shared_rows: np.ndarray) -> None:
    """What streams through the page cache pushes the table out; the next lookups read it again, rightly."""
    with open_table(REAL_WIDTH.write(tmp_path / "own")) as table:
        cold = ColdRows([table])
        ids = np.random.default_rng(2).integers(0, table.layout.rows, 500)
        pages = cold.set_aside(ids)
        for _ in range(3):
            table.lookup(ids)
            assert cold.count_cached(pages) == len(pages)
            cold.evict()
            assert cold.count_cached(pages) == 0
            assert np.array_equal(table.lookup(ids), shared_rows[ids].reshape(-1))


def test_d09_a_warm_table_costs_no_read(tmp_path: Path) -> None:
    """Advice on rows that are cached must not send anything to the drive."""
    with open_table(REAL_WIDTH.write(tmp_path / "own")) as table:
        ids = np.arange(0, table.layout.rows, 3)
        table.lookup(ids)
        before = bytes_read()
        for _ in range(3):
            table.lookup(ids)
            table.lookup(ids[:16])
        assert bytes_read() - before < 1 << 20  # of 10 MiB


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split("\nread_bytes: ")[1].split()[0])
