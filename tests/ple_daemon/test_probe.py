"""The drive test: reads past the page cache, what it says of a drive, and what it refuses."""

import json
import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import DEADLINE_S, names

from ple_daemon import drive_scratch, latency
from ple_daemon.__main__ import main
from ple_daemon.drive_reads import READ_BYTES, DirectFile, DirectReadError, filesystem
from ple_daemon.drive_scratch import scratch_file
from ple_daemon.errors import DaemonError
from ple_daemon.plot import plot_probe
from ple_daemon.probe import MIN_FILE_BYTES, Probe, probe

GIB = 1024**3


@pytest.fixture(scope="module")
def large_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As small as a file may be that is probed."""
    path = tmp_path_factory.mktemp("drive") / "large"
    with path.open("wb") as file:
        file.write(np.random.default_rng(0).bytes(MIN_FILE_BYTES))
        os.fsync(file.fileno())
    return path


@pytest.mark.parametrize("depth", [1, 3, 128])
def test_every_offset_is_read_once(depth: int, large_file: Path) -> None:
    before = io_counter("read_bytes")
    with DirectFile(large_file) as file:
        assert file.blocks == MIN_FILE_BYTES // READ_BYTES
        reads = file.read(np.arange(500) * READ_BYTES, depth)
    assert reads.count == 500
    assert reads.latencies_ns.min() > 0
    assert reads.per_second == 500 / reads.seconds
    assert io_counter("read_bytes") - before >= 500 * READ_BYTES


def test_buffers_hold_what_the_file_holds(large_file: Path) -> None:
    with DirectFile(large_file) as file:
        file.read(np.array([7 * READ_BYTES]), 1)
        assert bytes(file._buffers[:READ_BYTES]) == large_file.read_bytes()[7 * READ_BYTES : 8 * READ_BYTES]


def test_time_ends_a_read(large_file: Path) -> None:
    with DirectFile(large_file) as file:
        reads = file.read(file.random_offsets(np.random.default_rng(0), 1 << 20), 4, 0.05)
    assert 0 < reads.count < 1 << 20
    assert reads.seconds < 10


def test_reading_behind_the_end_is_an_error(large_file: Path) -> None:
    with DirectFile(large_file) as file, pytest.raises(DirectReadError, match="a direct read failed"):
        file.read(np.array([0, MIN_FILE_BYTES]), 2)


def test_depth_has_bounds(large_file: Path) -> None:
    with DirectFile(large_file) as file, pytest.raises(ValueError, match="outside 1 to 128"):
        file.read(np.zeros(1, np.int64), 129)


def test_descriptors_and_contexts_are_given_back(large_file: Path) -> None:
    before = len(names(Path("/proc/self/fd")))
    for _ in range(50):
        DirectFile(large_file).close()
    assert len(names(Path("/proc/self/fd"))) == before


def test_memory_is_no_drive() -> None:
    path = Path("/dev/shm")
    if filesystem(path) != "tmpfs":
        pytest.skip("no tmpfs at /dev/shm")
    file = path / f"ple-test-{os.getpid()}"
    file.write_bytes(bytes(READ_BYTES))
    try:
        with pytest.raises(DirectReadError, match=r"lies in memory \(tmpfs\), there is no drive to read"):
            DirectFile(file)
        before = names(path)
        with pytest.raises(DirectReadError, match=r"/dev/shm: lies in memory"):
            probe(path, 0.1, 1 << 30)
        assert names(path) == before
    finally:
        file.unlink()


def test_probe_of_a_file(large_file: Path) -> None:
    found = probe(large_file, 0.1, 0)
    assert (found.path, found.scratch) == (str(large_file), False)
    assert list(found.reads_per_s) == [1, 2, 4, 8, 16, 32, 64, 128]
    assert min(found.reads_per_s.values()) > 0
    assert found.seconds >= 0.1
    told = json.loads(found.as_json())
    assert told["verdict"] in ("suits", "borderline", "unsuitable")
    assert told["latency"]["count"] == len(found.latencies_ns)
    assert f"verdict: {told['verdict']}" in found.as_text()


def test_scratch_file_is_written_and_removed(tmp_path: Path) -> None:
    with scratch_file(tmp_path, 10_000_000) as path:
        status = path.stat()
        assert (status.st_size, names(tmp_path)) == (10_000_000, [path.name])
        assert status.st_blocks * 512 >= 10_000_000
    assert names(tmp_path) == []


def test_scratch_file_is_removed_when_the_probe_fails(tmp_path: Path) -> None:
    with pytest.raises(KeyError), scratch_file(tmp_path, 1000):
        raise KeyError
    assert names(tmp_path) == []


def test_scratch_file_needs_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        pytest.raises(DaemonError, match="do not fit; choose a smaller --size-gib"),
        scratch_file(tmp_path, 1 << 60),
    ):
        pass
    monkeypatch.setattr(drive_scratch, "_SPARE_BYTES", 1 << 60)
    with pytest.raises(DaemonError, match="do not fit"), scratch_file(tmp_path, 1):
        pass


def made(
    rate: float = 50_000, latency_ms: float = 0.1, slow: tuple[float, ...] = (), seconds: float = 60
) -> Probe:
    millis = np.concatenate([np.full(10_000, latency_ms), slow])
    return Probe("/drive", False, {1: rate / 10, 128: rate}, seconds, (millis * 1e6).astype(np.int64))


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (made(), "suits"),
        (made(rate=20_000), "borderline"),
        (made(rate=9_000), "unsuitable"),
        (made(latency_ms=2), "borderline"),
        (made(latency_ms=9), "unsuitable"),
        (made(slow=(99.0,)), "suits"),
        (made(slow=(140.0,)), "borderline"),
        (made(slow=(140.0,) * 3), "unsuitable"),
        (made(slow=(140.0,) * 3, seconds=120), "borderline"),
        (made(slow=(140.0,), seconds=10), "unsuitable"),
    ],
)  # fmt: skip
def test_verdicts(found: Probe, verdict: str) -> None:
    assert found.verdict == verdict


def test_summary_and_histogram() -> None:
    latencies_ns = np.array([50_000] * 990 + [3_000_000] * 9 + [970_000_000])
    summary = latency.summarise(latencies_ns)
    assert (summary.count, summary.p50_ms, summary.max_ms, summary.stalls) == (1000, 0.05, 970.0, 1)
    assert 0.05 < summary.p99_ms <= 3 < summary.p999_ms < 970
    lines = latency.histogram(latencies_ns).splitlines()
    assert len(lines) == 15
    assert lines[0].split()[:6] == ["32", "us", "to", "64", "us", "990"]
    assert lines[-1].split()[5] == "1"
    assert all("#" not in line for line in lines[2:5])


def refusal(path: Path) -> str:
    with pytest.raises(DaemonError) as caught:
        probe(path, 0.1, 0)
    return str(caught.value)


def test_what_cannot_be_probed(tmp_path: Path) -> None:
    sparse, small = tmp_path / "sparse", tmp_path / "small"
    with sparse.open("wb") as file:
        file.truncate(MIN_FILE_BYTES)
    small.write_bytes(bytes(5000))
    assert "a sparse file, its holes are not on the drive" in refusal(sparse)
    assert "only 5,000 bytes" in refusal(small)
    assert "neither a file nor a folder" in refusal(tmp_path / "none")


def test_the_command(command: Callable, large_file: Path) -> None:
    done = command("probe", large_file, "--seconds", "0.1", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["path"] == str(large_file)


def test_refusals_are_one_line(large_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", str(tmp_path / "none")]) == 1
    assert main(["probe", str(large_file), "--plot", str(tmp_path / "none" / "out.png")]) == 1
    assert main(["probe", str(large_file), "--plot", str(tmp_path / "out.psd")]) == 1
    with pytest.raises(SystemExit, match="2"):
        main(["probe", str(large_file), "--seconds", "-1"])
    with pytest.raises(SystemExit, match="2"):
        main(["probe", str(tmp_path), "--size-gib", "1e300"])
    assert main(["probe", str(tmp_path), "--size-gib", "0.01"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 6
    assert "its name may end in " in lines[2]
    assert "choose a larger --size-gib" in lines[-1]
    assert all(line.startswith("ple-daemon: ") for line in lines)


def test_a_picture(tmp_path: Path) -> None:
    plot_probe(made(slow=(140.0,)), tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_without_matplotlib_is_one_line(large_file: Path, tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None; from ple_daemon.__main__ import main; sys.exit(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "probe", str(large_file), "--plot", str(tmp_path / "out.png")],
        capture_output=True, text=True, timeout=DEADLINE_S,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == "ple-daemon: --plot needs matplotlib: pip install matplotlib\n"


def io_counter(name: str) -> int:
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1])
    raise AssertionError(name)


def test_pages_are_what_is_read() -> None:
    assert READ_BYTES == mmap.PAGESIZE
