"""The daemon as a process: how it starts, refuses, stops, dies and comes back."""

import json
import os
import re
import shutil
import signal
import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import grpc
import numpy as np
import pytest
from conftest import REAL_WIDTH, Daemon, eventually, names
from ple_checkpoint import PREFIX, Checkpoint

from ple_daemon import kernel_cache
from ple_daemon.flat_file import SegmentSum, describe, sidecar_path
from ple_daemon.hash_constants import derive, padded_rows
from ple_daemon.settings import SettingsError, load
from ple_daemon.table import Table
from ple_daemon.table_format import RowType, Segment, TableLayout
from ple_rpc.client import TableClient
from ple_rpc.errors import BadRow, TableChanged
from ple_rpc.table.v1.table_service_pb2 import DescribeRequest, LookupRequest, LookupStreamRequest

Start = Callable[..., Daemon]


def rows_request(ids: object) -> LookupRequest:
    return LookupRequest(row_ids_le64=np.asarray(ids, "<i8").tobytes())


def test_socket_and_folder_are_private(start: Start, shared_checkpoint: Path, run_dir: Path) -> None:
    start(shared_checkpoint).wait_ready()
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
    assert stat.S_IMODE((run_dir / "table.sock").stat().st_mode) == 0o660
    assert stat.S_IMODE((run_dir / "bell.sock").stat().st_mode) == 0o660
    assert names(run_dir) == ["bell.sock", "daemon.lock", "table.sock"]


@pytest.mark.parametrize("mode", [0o1777, 0o755, 0o2771])
def test_a_folder_that_all_users_share_is_left_alone(command: Callable, run_dir: Path, mode: int) -> None:
    run_dir.mkdir()
    (run_dir / "other").touch()
    run_dir.chmod(mode)
    done = command("serve", "table", "--run-dir", run_dir, "--http-address", "127.0.0.1:0")
    assert done.returncode == 1
    assert f"run directory {run_dir}: all users share it; choose another" in done.stderr.splitlines()[-1]
    assert stat.S_IMODE(run_dir.stat().st_mode) == mode
    assert names(run_dir) == ["other"]


def test_an_empty_folder_is_closed_to_others_and_keeps_its_group(
    start: Start, shared_checkpoint: Path, run_dir: Path
) -> None:
    run_dir.mkdir()
    run_dir.chmod(0o2755)
    start(shared_checkpoint).wait_ready()
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o2750


def test_only_private_sockets_of_dead_daemons_are_removed(
    start: Start, shared_checkpoint: Path, run_dir: Path
) -> None:
    run_dir.mkdir(mode=0o700)
    for name in (".t1.txt", ".b2-notes", ".t3"):
        (run_dir / name).touch()
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(run_dir / ".t4"))
    start(shared_checkpoint).wait_ready()
    assert names(run_dir) == [".b2-notes", ".t1.txt", ".t3", "bell.sock", "daemon.lock", "table.sock"]


@pytest.mark.parametrize("how", ["removed", "replaced", "with its folder"])
def test_a_daemon_whose_socket_is_gone_ends(
    start: Start, shared_checkpoint: Path, run_dir: Path, how: str
) -> None:
    daemon = start(shared_checkpoint).wait_ready()
    if how == "with its folder":
        shutil.rmtree(run_dir)
    else:
        (run_dir / "table.sock").unlink()
    if how == "replaced":
        (run_dir / "table.sock").touch()
    assert daemon.wait() == 1
    assert "somebody removed or replaced the socket" in daemon.log.splitlines()[-1]
    assert "Traceback" not in daemon.log
    if how == "replaced":
        assert (run_dir / "table.sock").exists()


def test_settings_come_from_the_environment_and_are_logged_once(
    start: Start, shared_checkpoint: Path
) -> None:
    daemon = start(
        shared_checkpoint, "--advice", "none",
        PLE_DAEMON_ADVICE="posix_fadvise", PLE_DAEMON_DRAIN_TIMEOUT_S="3",
        PLE_DAEMON_PORT="tcp://10.0.0.1:80", PLE_DAEMON_SERVICE_HOST="10.0.0.1",
    ).wait_ready()  # fmt: skip
    assert daemon.health()[1]["advice"] == "none"  # arguments win
    assert daemon.log.count("drain_timeout_s=3.0") == 1
    assert re.search(r"^\d{4}-\S+Z INFO ple-daemon starting table=", daemon.log)


def test_stop_lets_a_running_lookup_finish(
    start: Start, shared_checkpoint: Path, shared_rows: np.ndarray
) -> None:
    daemon = start(shared_checkpoint).wait_ready()
    daemon.stub.Describe(DescribeRequest(), timeout=30)
    # Far more than the transport buffers, so the lookup is in flight until the answers are read.
    ids = np.arange(60_000) % len(shared_rows)
    answers = daemon.stub.LookupStream(iter([LookupStreamRequest(lookup=rows_request(ids))]), timeout=60)
    parts = [next(answers).rows]
    daemon.signal(signal.SIGTERM)
    eventually(lambda: "draining" in daemon.log, "drain begun")
    assert daemon.health() == (503, daemon.health()[1])
    assert daemon.health()[1]["state"] == "stopping"
    with pytest.raises(grpc.RpcError) as failure:
        daemon.stub.Describe(DescribeRequest(), timeout=30)
    assert failure.value.code() is grpc.StatusCode.UNAVAILABLE
    parts.extend(answer.rows for answer in answers)
    assert b"".join(parts) == shared_rows[ids].tobytes()
    assert daemon.wait() == 0
    assert "calls_finished=True prefetch_stopped=True" in daemon.log
    assert names(daemon.run_dir) == ["daemon.lock"]


def test_stop_does_not_wait_for_ever(start: Start, shared_checkpoint: Path, shared_rows: np.ndarray) -> None:
    daemon = start(shared_checkpoint, "--drain-timeout-s", "0.2").wait_ready()
    ids = np.arange(60_000) % len(shared_rows)
    answers = daemon.stub.LookupStream(iter([LookupStreamRequest(lookup=rows_request(ids))]), timeout=60)
    next(answers)  # and read no more
    daemon.signal(signal.SIGTERM)
    assert daemon.wait() == 0
    assert "calls_finished=False" in daemon.log


def test_an_idle_stream_does_not_hold_a_stop_up(start: Start, shared_checkpoint: Path) -> None:
    daemon = start(shared_checkpoint, "--drain-timeout-s", "60").wait_ready()
    more = threading.Event()

    def requests() -> object:
        yield LookupStreamRequest(lookup=rows_request([1]))
        more.wait(60)

    answers = daemon.stub.LookupStream(requests(), timeout=60)
    assert next(answers).last
    daemon.signal(signal.SIGINT)
    assert daemon.wait() == 0
    more.set()
    with pytest.raises(grpc.RpcError):
        next(answers)


def test_kill_and_restart_on_the_same_run_directory(
    start: Start, shared_checkpoint: Path, shared_rows: np.ndarray
) -> None:
    daemon = start(shared_checkpoint).wait_ready()
    instances = set()
    with TableClient(f"unix:{daemon.socket}") as client:
        for _ in range(2):
            assert client.lookup([1, 5]) == shared_rows[[1, 5]].tobytes()
            instances.add(daemon.health()[1]["instance_id"])
            daemon.signal(signal.SIGKILL)
            assert daemon.wait() == -signal.SIGKILL
            assert daemon.socket.exists()  # stale: nobody listens
            daemon = start(shared_checkpoint).wait_ready()
        assert client.lookup([2]) == shared_rows[2].tobytes()
    assert len(instances) == 2


def test_one_daemon_per_run_directory(start: Start, shared_checkpoint: Path) -> None:
    first = start(shared_checkpoint).wait_ready()
    second = start(shared_checkpoint)
    assert second.wait() == 1
    assert one_error(second).startswith(
        f"ple-daemon: run directory {first.run_dir}: another ple-daemon uses it"
    )
    assert first.stub.Describe(DescribeRequest(), timeout=30).protocol_version == 1


def test_a_replaced_socket_is_not_deleted(start: Start, shared_checkpoint: Path) -> None:
    daemon = start(shared_checkpoint).wait_ready()
    daemon.socket.unlink()
    daemon.socket.write_text("somebody else's")
    daemon.signal(signal.SIGTERM)
    assert daemon.wait() == 0
    assert daemon.socket.read_text() == "somebody else's"


def test_truncation_under_a_running_daemon(start: Start, tmp_path: Path, shared_rows: np.ndarray) -> None:
    daemon = start(REAL_WIDTH.write(tmp_path / "own"), "--watch-interval-s", "0.2").wait_ready()
    victim = tmp_path / "own" / "model-00002-of-00003.safetensors"  # holds shard 1
    first = REAL_WIDTH.rows // 4
    assert daemon.stub.Lookup(rows_request([first]), timeout=30).rows == shared_rows[first].tobytes()
    os.truncate(victim, 1000)
    codes = set()
    for ids in ([first + 100], np.arange(first, first + 300), [0]):
        with pytest.raises(grpc.RpcError) as failure:
            daemon.stub.Lookup(rows_request(ids), timeout=30)
        codes.add(failure.value.code())
    assert codes <= {grpc.StatusCode.DATA_LOSS, grpc.StatusCode.FAILED_PRECONDITION}
    eventually(lambda: daemon.health()[1]["state"] == "degraded", "degraded")
    status, body = daemon.health()
    assert status == 200
    assert any(str(victim) in reason for reason in body["reasons"])
    assert "table changed, lookups are refused" in daemon.log
    assert daemon.process.poll() is None


def test_a_table_replaced_in_place_is_refused(start: Start, tmp_path: Path) -> None:
    folder = REAL_WIDTH.write(tmp_path / "own")
    daemon = start(folder, "--watch-interval-s", "0.1").wait_ready()
    with TableClient(f"unix:{daemon.socket}") as shared:
        assert len(shared.lookup([0])) == 320
        Checkpoint(width=160, base=2000, seed=9).write(folder)
        eventually(lambda: daemon.health()[1]["state"] == "degraded", "degraded")
        for ids in ([0], range(100)):
            with pytest.raises(grpc.RpcError) as failure:
                daemon.stub.Lookup(rows_request(ids), timeout=30)
            assert failure.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert shared.region is not None
            with pytest.raises(TableChanged):
                shared.lookup(ids)


def test_refusals_are_one_line(
    command: Callable, shared_checkpoint: Path, run_dir: Path, tmp_path: Path
) -> None:
    made = Checkpoint()
    tensors = made.tensors()
    del tensors[PREFIX + "ngram_embedding.shard_2.weight"]
    broken = made.write(tmp_path / "broken", tensors)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        good = {
            "PLE_DAEMON_TABLE": str(shared_checkpoint),
            "PLE_DAEMON_RUN_DIR": str(run_dir),
            "PLE_DAEMON_HTTP_ADDRESS": "127.0.0.1:0",
        }
        for wrong, words in (
            ({"PLE_DAEMON_TABLE": str(broken)}, f"{broken}: missing shard 2 of 4"),
            ({"PLE_DAEMON_TABLE": str(tmp_path / "none")}, "none: does not exist"),
            ({"PLE_DAEMON_HTTP_ADDRESS": address}, "Address already in use; choose another --http-address"),
            ({"PLE_DAEMON_RUN_DIR": "/tmp/" + "x" * 100}, "choose a shorter run directory"),
            ({"PLE_DAEMON_RUN_DIR": "/proc/none"}, "run directory /proc/none: "),
            ({"PLE_DAEMON_TABEL": "x"}, "PLE_DAEMON_TABEL: unknown setting; known are PLE_DAEMON_ADVICE"),
        ):
            done = command("serve", **good | wrong)
            assert done.returncode == 1, done.stderr
            assert "Traceback" not in done.stderr
            last = done.stderr.splitlines()[-1]
            assert last.startswith("ple-daemon: ")
            assert words in last


def test_a_missing_table_is_one_line(command: Callable) -> None:
    done = command("serve")
    assert (done.returncode, done.stderr) == (1, "ple-daemon: TABLE or PLE_DAEMON_TABLE: field required\n")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("advice", "x"),
        ("drain_timeout_s", "-1"),
        ("http_address", "nowhere"),
        ("max_concurrent_calls", "1.5"),
        ("table", "/t\udcff"),
        ("run_dir", "/r\udcff"),
    ],
)
def test_bad_settings_name_option_and_variable(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    option = "TABLE" if name == "table" else "--" + name.replace("_", "-")
    monkeypatch.setenv("PLE_DAEMON_TABLE", "/table")
    monkeypatch.setenv(f"PLE_DAEMON_{name.upper()}", value)
    with pytest.raises(SettingsError, match=f"^{option} or PLE_DAEMON_{name.upper()}: "):
        load({})


def test_wrong_arguments_are_one_line(command: Callable) -> None:
    done = command("serve", "--nonsense")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "unrecognized arguments: --nonsense; try ple-daemon --help" in done.stderr
    assert "examples:" in command("--help").stdout
    assert "examples:" in command("serve", "--help").stdout


def test_kernels_are_cached_where_they_may_be(
    start: Start, shared_checkpoint: Path, tmp_path: Path, command: Callable
) -> None:
    start(shared_checkpoint).wait_ready().close()  # compiles them beside the code, where no test did before
    beside_code = kernel_cache.prepare(None)
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    shutil.copytree(beside_code, cache / beside_code.name)
    made = {path: path.stat().st_mtime_ns for path in cache.rglob("*.nb*")}
    assert len([path for path in made if path.suffix == ".nbc"]) >= 8
    start(shared_checkpoint, "--cache-dir", str(cache)).wait_ready().close()
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*.nb*")} == made
    emptied = [*cache.rglob("gather.*.nbi"), *cache.rglob("ngram_hash.*.nbc")]
    assert len(emptied) >= 2
    for path in emptied:  # as a power cut leaves files that were not synced
        path.write_bytes(b"")
    start(shared_checkpoint, "--cache-dir", str(cache)).wait_ready()
    assert all(path.stat().st_size for path in cache.rglob("*.nb[ci]"))
    assert all(path.exists() for path in emptied), "compiled where they were told"
    cache.chmod(0o777)
    refused = command("serve", shared_checkpoint, "--cache-dir", cache)
    assert refused.returncode == 1
    assert "others can write there" in refused.stderr.splitlines()[-1]


def one_error(daemon: Daemon) -> str:
    assert "Traceback" not in daemon.log
    return daemon.log.splitlines()[-1]


def test_every_file_with_kernels_names_the_cache() -> None:
    folder = Path(kernel_cache.__file__).parent
    with_kernels = {p.name for p in folder.glob("*.py") if "@njit" in p.read_text()}
    assert with_kernels == set(kernel_cache._KERNEL_FILES)


def test_a_cancelled_stream_holds_nothing(start: Start, shared_checkpoint: Path) -> None:
    daemon = start(shared_checkpoint, "--drain-timeout-s", "60").wait_ready()
    answers = daemon.stub.LookupStream(
        iter([LookupStreamRequest(lookup=rows_request(np.zeros(200_000)))]), timeout=60
    )
    next(answers)
    answers.cancel()
    daemon.signal(signal.SIGTERM)
    assert daemon.wait() == 0
    assert "calls_finished=True" in daemon.log


NO_PROCESS_MADVISE = """
import ctypes, os, struct, sys
# As a container's default seccomp profile does: syscall 440 (process_madvise) answers EPERM.
filters = [(0x20, 0, 0, 0), (0x15, 0, 1, 440), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in filters))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(filters), ctypes.addressof(code)))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, program) == 0, os.strerror(ctypes.get_errno())
os.execv(sys.executable, [sys.executable, "-m", "ple_daemon", *sys.argv[1:]])
"""


def test_forbidden_process_madvise_falls_back(
    start: Start, shared_checkpoint: Path, shared_rows: np.ndarray
) -> None:
    daemon = start(shared_checkpoint, launcher=["-c", NO_PROCESS_MADVISE]).wait_ready()
    body = daemon.health()[1]
    assert (body["state"], body["advice"]) == ("ready", "posix_fadvise")
    assert body["reasons"] == ["advice is posix_fadvise (process_madvise: Operation not permitted)"]
    assert daemon.log.count("advice chosen") == 1
    ids = np.arange(0, 20_000, 7)
    with TableClient(f"unix:{daemon.socket}") as client:
        assert client.lookup(ids.tolist()) == shared_rows[ids].tobytes()
        assert client.lookup([5]) == shared_rows[5].tobytes()


def test_a_table_of_the_real_size(start: Start, tmp_path: Path) -> None:
    """320,001,536 rows of 320 bytes, sparse: addresses beyond 32 bits, little memory, a quick start. d04."""
    constants = derive(vocab_size=248_320, eos_token_id=248_044)
    rows = padded_rows(constants.used_rows, 128)
    path = tmp_path / "real.ple"
    marked = [0, 2**31 // 320, 2**32 // 320 + 1, 2**32 // 16, rows - 1]
    with path.open("wb") as file:
        file.truncate(rows * 320)
        for row in marked:
            file.seek(row * 320)
            file.write(row.to_bytes(8, "little") * 40)
    layout = TableLayout(RowType.BF16, 160, rows, b"", constants, (Segment(path, 0, rows),))
    with Table(layout) as table:
        fields = describe(layout, table.fingerprint.hex(), "", [SegmentSum("sparse", rows, "")])
    sidecar_path(path).write_text(json.dumps(fields))
    daemon = start(path).wait_ready()
    with TableClient(f"unix:{daemon.socket}") as client:
        assert marked[-1] == 320_001_535
        assert client.lookup(marked) == b"".join(row.to_bytes(8, "little") * 40 for row in marked)
        with pytest.raises(BadRow, match="row 320001536"):
            client.lookup([rows])
        client.prefetch("a", range(500))
        eventually(lambda: daemon.metric("ple_daemon_rows_prefetched_total") == 8000, "prefetch counted")
    assert daemon.metric("ple_daemon_anonymous_bytes") < 300e6
