"""What a machine may lack or forbid: space, memory, writable folders, the right user."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from conftest import DEADLINE_S, Daemon, eventually

import ple_daemon

Start = Callable[..., Daemon]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts, or another user's process")

CLIENT = """
import grpc, json, logging, os, resource, sys
from ple_rpc.client import TableClient
logging.basicConfig(level="INFO")
address, first = sys.argv[1:]
exec(first)  # once everything is imported: as another user one may not read the interpreter's folder
with TableClient(address) as client:
    rows = client.lookup([7, 9])
    print(json.dumps({"is_shared": client.region is not None, "rows": rows.hex()}))
"""


def look_up(daemon: Daemon, first: str) -> tuple[dict, str]:
    """What a client process gets that runs `first` before it connects, and its log."""
    command = [sys.executable, "-c", CLIENT, f"unix:{daemon.socket}", first]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def test_a_client_without_room_for_a_region_gets_rows_over_grpc(
    start: Start, shared_checkpoint: Path, shared_rows: np.ndarray
) -> None:
    """A memfd lies on no tmpfs that could be filled: a limit stands for memory that has run out."""
    daemon = start(shared_checkpoint).wait_ready()
    limit = "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))"
    got, log = look_up(daemon, limit)
    assert got == {"is_shared": False, "rows": shared_rows[[7, 9]].tobytes().hex()}
    assert "no shared memory through" in log
    assert "File too large" in log
    eventually(lambda: daemon.metric("ple_daemon_sessions") == 0, "session gone")


@needs_root
def test_who_may_share_memory(start: Start, shared_checkpoint: Path, shared_rows: np.ndarray) -> None:
    """The clients' group may, as primary or supplementary group; other users are served over gRPC."""
    group = 54_321
    daemon = start(shared_checkpoint, "--client-gid", str(group)).wait_ready()
    # So that nothing but the daemon itself keeps anybody out.
    for path, mode in ((daemon.run_dir.parent, 0o755), (daemon.run_dir, 0o755)):
        path.chmod(mode)
    for name in ("table.sock", "bell.sock"):
        (daemon.run_dir / name).chmod(0o666)
    for groups, primary, is_shared in (([group], 54_999, True), ([], group, True), ([], 54_999, False)):
        user = f"os.setgroups({groups}); os.setgid({primary}); os.setuid(54_322)"
        got, log = look_up(daemon, user)
        assert got == {"is_shared": is_shared, "rows": shared_rows[[7, 9]].tobytes().hex()}, log
        assert is_shared == ("user 54322 may not attach" not in log)
    assert daemon.log.count("region refused reason=user 54322 may not attach") == 1
    assert look_up(daemon, "pass")[0]["is_shared"], "root may"


# -- full and read-only file systems -----------------------------------------------------------------------


@pytest.fixture
def mount_tmpfs(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts tmpfs with the given options."""
    mounted: list[Path] = []

    def mount(options: str) -> Path:
        folder = tmp_path / f"tmpfs-{len(mounted)}"
        folder.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "none", folder], capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(f"mounting is forbidden here: {done.stderr}")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "--lazy", folder], check=True)


@needs_root
@pytest.mark.parametrize("inodes", [1, 3])
def test_a_run_directory_without_space_is_one_line(
    inodes: int, command: Callable, shared_checkpoint: Path, mount_tmpfs: Callable[[str], Path]
) -> None:
    """Sockets and locks take no space, but an inode each: none is left for the folder, or for a socket."""
    run_dir = mount_tmpfs(f"size=64k,nr_inodes={inodes}") / "run"
    done = command("serve", shared_checkpoint, "--run-dir", run_dir, "--http-address", "127.0.0.1:0")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(
        f"ple-daemon: {run_dir}/" if inodes == 3 else f"ple-daemon: run directory {run_dir}"
    )
    assert "No space left on device" in last
    assert "Traceback" not in done.stderr


@needs_root
def test_kernels_without_space_are_one_line(
    command: Callable, shared_checkpoint: Path, run_dir: Path, mount_tmpfs: Callable[[str], Path]
) -> None:
    folder = mount_tmpfs("size=1m,mode=700")
    done = command("serve", shared_checkpoint, "--run-dir", run_dir, "--cache-dir", folder)
    assert done.returncode == 1
    assert done.stderr == (
        f"ple-daemon: kernel cache {folder}: compiled kernels need 8 MiB and less is free; "
        "set PLE_DAEMON_CACHE_DIR\n"
    )


READ_ONLY = """
import ctypes, os, sys
BIND, RECURSIVE, PRIVATE, REMOUNT, READ_ONLY, NEW_MOUNTS = 4096, 16384, 1 << 18, 32, 1, 0x20000
libc = ctypes.CDLL(None, use_errno=True)
def must(status):
    if status:
        raise SystemExit("forbidden: " + os.strerror(ctypes.get_errno()))
writable = [os.fsencode(folder) for folder in os.environ["WRITABLE"].split(":")]
must(libc.unshare(NEW_MOUNTS))
must(libc.mount(None, b"/", None, RECURSIVE | PRIVATE, None))
for folder in writable:
    must(libc.mount(folder, folder, None, BIND, None))
for line in open("/proc/self/mounts", "rb").read().splitlines():
    folder = line.split()[1]
    if folder not in writable and not folder.startswith((b"/proc", b"/sys", b"/dev")):
        must(libc.mount(None, folder, None, REMOUNT | BIND | READ_ONLY, None))
os.chdir("/")
os.execv(sys.executable, [sys.executable, "-m", "ple_daemon", *sys.argv[1:]])
"""


def start_read_only(start: Start, table: Path, *arguments: str, writable: list[Path]) -> Daemon:
    """A daemon for which every other folder is read-only."""
    folders = ":".join(map(str, writable))
    daemon = start(table, *arguments, launcher=["-c", READ_ONLY], WRITABLE=folders)
    eventually(lambda: "ple-daemon" in daemon.log or daemon.process.poll() is not None, "its first words")
    if daemon.log.startswith("forbidden"):
        pytest.skip(f"mounting is {daemon.log}")
    return daemon


@needs_root
def test_a_read_only_root(start: Start, shared_checkpoint: Path, run_dir: Path) -> None:
    """As in a container: what can be written are the run directory and the folder of compiled kernels."""
    run_dir.mkdir(mode=0o700)
    kernels = Path(ple_daemon.__file__).parent / "__pycache__"
    daemon = start_read_only(start, shared_checkpoint, writable=[run_dir, kernels]).wait_ready()
    assert look_up(daemon, "pass")[0]["is_shared"]


@needs_root
def test_nowhere_to_keep_kernels_is_one_line(start: Start, shared_checkpoint: Path, run_dir: Path) -> None:
    run_dir.mkdir(mode=0o700)
    cache = run_dir.parent / "kernels"
    for arguments, reason in (
        ((), ": neither the code's folder nor a temporary one can be written"),
        (("--cache-dir", str(cache)), f" {cache}: Read-only file system"),
    ):
        daemon = start_read_only(start, shared_checkpoint, *arguments, writable=[run_dir])
        assert daemon.wait() == 1
        assert daemon.log == f"ple-daemon: kernel cache{reason}; set PLE_DAEMON_CACHE_DIR\n"
