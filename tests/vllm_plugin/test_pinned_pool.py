"""Memory of exactly the asked size, one rank at a time, and only where there is room."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cuda_on_cpu import Cudart

from ple_inference import host_ram
from ple_inference.vllm_plugin import pinned_pool, pinning_turn
from ple_inference.vllm_plugin.pinned_pool import NotEnoughRam, PinnedPool
from ple_inference.vllm_plugin.pinning_turn import PinningTurn, TurnTaken

MIB = 2**20
HOLDER = """
import sys
from pathlib import Path
from ple_inference.vllm_plugin.pinning_turn import PinningTurn
with PinningTurn("9 bytes for a test", path=Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(pinning_turn.tempfile, "gettempdir", lambda: str(tmp_path))
    return tmp_path / f"triplex-pinning-{os.getuid()}.lock"


def _resident_bytes() -> int:
    """Without pages of files, which the kernel takes back when it likes."""
    status = Path("/proc/self/status").read_text()
    return sum(int(kib) << 10 for kib in re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+) kB", status, re.MULTILINE))


def test_a_pool_is_of_its_size_and_registered(cudart: Cudart) -> None:
    size = 96 * MIB + 4096 + 17  # no power of two, no page, and large enough for huge pages
    before = _resident_bytes()
    with PinnedPool(size, "a test") as pool:
        assert cudart.registered == {pool.bytes.data_ptr(): size}
        assert pool.bytes.shape == (size,)
        pool.bytes.fill_(0xA5)
        taken = _resident_bytes() - before
        assert size <= taken < size + 4 * MIB
        assert int(pool.bytes[-1]) == 0xA5
    assert not cudart.registered
    assert _resident_bytes() - before < 4 * MIB
    pool.close()  # a second time, as after an error


def test_memory_that_the_driver_refuses_is_given_back(cudart: Cudart) -> None:
    cudart.refuses = True
    with pytest.raises(RuntimeError, match=r"does not register 4096 bytes of host memory \(error 2\)"):
        PinnedPool(4096, "a test")
    assert not cudart.registered
    with pytest.raises(ValueError, match="a pool of 0 bytes"):
        PinnedPool(0, "a test")


def test_no_room(cudart: Cudart, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned_pool, "available_bytes", lambda: 3 * 2**30)
    with pytest.raises(NotEnoughRam, match=r"K/V needs 2\.50 GiB of pinned RAM and 3\.00 GiB are available"):
        PinnedPool(5 * 2**29, "K/V")
    assert not cudart.registered
    PinnedPool(2**30, "K/V").close()


def test_the_turn_is_named_and_freed_by_death(lock: Path, cudart: Cudart) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        reason = rf"within 0\.1 s: process {holder.pid}, 9 bytes for a test holds {lock}"
        with pytest.raises(TurnTaken, match=reason), PinningTurn("more", deadline_s=0.1):
            pass
    finally:
        holder.kill()
        holder.communicate(timeout=30)
    PinnedPool(4096, "a test").close()


def test_a_lock_that_cannot_be_opened(lock: Path) -> None:
    lock.symlink_to("/elsewhere")
    with pytest.raises(TurnTaken, match=r"cannot open the lock .*; remove it"), PinningTurn("more"):
        pass


def test_a_full_disk_takes_no_note_and_the_turn_is_held(lock: Path) -> None:
    full = Path("/dev/full")
    with (
        PinningTurn("9 bytes", path=full),
        pytest.raises(TurnTaken, match="holds /dev/full"),
        PinningTurn("more", path=full, deadline_s=0.1),
    ):
        pass
    with PinningTurn("more", path=full, deadline_s=0.1):
        pass


def test_pinned_tensors_of_torch_see_the_pool(cudart: Cudart) -> None:
    """A view of another type, as K/V would take it."""
    with PinnedPool(64 * 4, "a test") as pool:
        numbers = pool.bytes.view(torch.float32)
        numbers.copy_(torch.arange(64))
        assert pool.bytes.view(torch.float32)[63] == 63


# -- how much RAM is left ------------------------------------------------------------------------------


def _machine(root: Path, cgroup: str) -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text("MemTotal: 64000 kB\nMemAvailable: 32000 kB\n")
    (root / "proc/self/cgroup").write_text(cgroup)


def _group(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


def test_ram_of_a_machine_without_limits(tmp_path: Path) -> None:
    _machine(tmp_path, "0::/user.slice\n")
    _group(tmp_path / "sys/fs/cgroup/user.slice", memory__max="max", memory__current=1)
    assert host_ram.available_bytes(tmp_path) == 32_000 * 1024
    assert host_ram.available_bytes() > 0


def test_ram_within_the_tightest_cgroup(tmp_path: Path) -> None:
    _machine(tmp_path, "0::/a/b\n")
    _group(tmp_path / "sys/fs/cgroup/a/b", memory__max=9000, memory__current=2000)
    _group(tmp_path / "sys/fs/cgroup/a", memory__max=5000, memory__current=4000)
    (tmp_path / "sys/fs/cgroup/a/memory.stat").write_text("anon 3000\ninactive_file 500\n")
    assert host_ram.available_bytes(tmp_path) == 1500


def test_ram_of_a_container_that_sees_only_its_own_cgroup(tmp_path: Path) -> None:
    _machine(tmp_path, "0::/docker/0123\n")
    _group(tmp_path / "sys/fs/cgroup", memory__max=7000, memory__current=7500)
    assert host_ram.available_bytes(tmp_path) == 0


def test_ram_by_the_first_version_of_cgroups(tmp_path: Path) -> None:
    _machine(tmp_path, "5:cpu,cpuacct:/a\n4:memory:/a\n")
    limits = {"memory__limit_in_bytes": 4096, "memory__usage_in_bytes": 96}
    _group(tmp_path / "sys/fs/cgroup/memory/a", **limits)
    unlimited = {"memory__limit_in_bytes": 2**63 - 4096, "memory__usage_in_bytes": 96}
    _group(tmp_path / "sys/fs/cgroup/memory", **unlimited)
    assert host_ram.available_bytes(tmp_path) == 4000
