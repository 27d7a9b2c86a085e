"""The shared-memory plane of a running daemon: what it promises, to good clients and against bad ones."""

import ctypes
import os
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import grpc
import numpy as np
import pytest
from conftest import DEADLINE_S, REAL_WIDTH, Daemon, eventually
from shm_peer import peer

from ple_daemon.ngram_hash import NgramHash
from ple_rpc import bell
from ple_rpc.client import ClientOptions, TableClient
from ple_rpc.errors import BadRequest, BadRow
from ple_rpc.shared_region import (
    F_SEAL_FUTURE_WRITE,
    F_SEAL_GROW,
    F_SEAL_SEAL,
    F_SEAL_SHRINK,
    SEALS,
    RegionLayout,
)
from ple_rpc.table.v1 import table_pb2
from ple_rpc.table.v1.table_service_pb2 import AttachRequest, CancelPrefetchRequest, PrefetchRequest

Code = grpc.StatusCode
_KEEP_SIZE, _PUNCH_HOLE = 1, 2


def client(daemon: Daemon, **options: object) -> TableClient:
    made = TableClient(f"unix:{daemon.socket}", ClientOptions(**options))
    made.wait_ready(DEADLINE_S)
    return made


def descriptors(daemon: Daemon) -> int:
    return len(list(Path(f"/proc/{daemon.process.pid}/fd").iterdir()))


def region_maps(daemon: Daemon) -> int:
    maps = Path(f"/proc/{daemon.process.pid}/maps").read_text()
    return maps.count("memfd:peer") + maps.count("memfd:ple-region")


def threads(daemon: Daemon) -> int:
    return len(list(Path(f"/proc/{daemon.process.pid}/task").iterdir()))


def sessions(daemon: Daemon) -> float:
    return daemon.metric("ple_daemon_sessions")


def is_clean(daemon: Daemon) -> bool:
    return sessions(daemon) == 0 and daemon.metric("ple_daemon_shm_regions") == 0 and region_maps(daemon) == 0


@pytest.fixture(autouse=True)
def nothing_stays(daemon: Daemon):
    """Whatever a test did, no session, region or mapping is left, and the daemon still serves."""
    yield
    eventually(lambda: is_clean(daemon), "sessions and regions gone")
    with client(daemon) as good:
        assert good.region is not None
        assert len(good.lookup([1])) == 320


# -- good clients ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 16, 64, 65, 256, 257, 320, 5000, 20_000])
def test_rows_through_shared_memory(daemon: Daemon, shared_rows: np.ndarray, count: int) -> None:
    ids = np.random.default_rng(count).integers(0, len(shared_rows), count)
    with client(daemon) as shm:
        assert shm.region is not None
        expected = shared_rows[ids].tobytes()
        assert shm.lookup(ids) == expected
        assert shm.lookup(ids.tolist()) == expected
        assert shm.lookup(ids.tobytes()) == expected
        out = bytearray(b"\xa5" * len(expected))
        assert shm.lookup(ids, out) == expected
        assert out == expected


def test_lookups_are_counted_by_plane(daemon: Daemon) -> None:
    name = 'ple_daemon_shm_lookups_total{kind="%s",outcome="ok"}'
    before = [daemon.metric(name % kind) for kind in ("decode", "bulk")]
    rows = daemon.metric("ple_daemon_rows_total")
    with client(daemon) as shm:
        shm.lookup(range(16))
        shm.lookup(range(1000))
    assert [daemon.metric(name % kind) for kind in ("decode", "bulk")] == [before[0] + 1, before[1] + 1]
    assert daemon.metric("ple_daemon_rows_total") == rows + 1016
    assert daemon.metric('ple_daemon_shm_lookup_seconds_count{kind="bulk"}') >= 1


def test_prefetched_rows_are_looked_at_when_they_are_used(daemon: Daemon) -> None:
    name = "ple_daemon_%s_total"
    read, checked = (daemon.metric(name % key) for key in ("rows_prefetched", "prefetched_rows_checked"))
    with client(daemon) as shm:
        shm.prefetch("a", range(300))
        eventually(lambda: daemon.metric(name % "rows_prefetched") == read + 300 * 16, "rows read ahead")
        shm.lookup(NgramHash(REAL_WIDTH.constants).row_ids(range(300)).reshape(-1))
    assert daemon.metric(name % "prefetched_rows_checked") > checked


def test_rows_stay_in_their_slot_until_released(daemon: Daemon, shared_rows: np.ndarray) -> None:
    with client(daemon) as shm:
        first, second = shm.lookup_into_slot([1, 2]), shm.lookup_into_slot([3])
        assert shm.lookup(range(100)) == shared_rows[:100].tobytes()
        region = shm.region
        assert region is not None
        assert bytes(first.rows) == shared_rows[[1, 2]].tobytes()
        assert bytes(region.buffer[second.offset_bytes :][:320]) == shared_rows[3].tobytes()
        first.release()
        second.release()


def test_bad_rows_are_named(daemon: Daemon, shared_rows: np.ndarray) -> None:
    with client(daemon) as shm:
        for ids in ([0, len(shared_rows)], [-1], [*range(500), 2**62]):
            with pytest.raises(BadRow, match=re.escape(f"row {ids[-1]}")):
                shm.lookup(ids)
            assert shm.lookup([5]) == shared_rows[5].tobytes()


def test_buffers_that_cannot_be_meant_are_refused(daemon: Daemon) -> None:
    with client(daemon) as shm:
        for ids in (np.zeros(4, np.int32), np.zeros(4), np.arange(8)[::2], b"123"):
            with pytest.raises(BadRequest):
                shm.lookup(ids)
        for out in (bytearray(1), bytes(320)):
            with pytest.raises(BadRequest):
                shm.lookup([1], out)


def test_without_slots_rows_come_over_grpc(daemon: Daemon, shared_rows: np.ndarray) -> None:
    with client(daemon, slots=0) as plain:
        assert plain.region is None
        assert plain.lookup([4, 2]) == shared_rows[[4, 2]].tobytes()
        assert sessions(daemon) == 1


def test_many_threads_share_the_slots_of_a_client(daemon: Daemon, shared_rows: np.ndarray) -> None:
    wrong: list[object] = []

    def work(seed: int, shm: TableClient) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(60):
            ids = rng.integers(0, len(shared_rows), (1, 16, 300)[seed % 3])
            if shm.lookup(ids) != shared_rows[ids].tobytes():
                wrong.append(ids)

    with client(daemon) as shm:
        workers = [threading.Thread(target=work, args=(seed, shm)) for seed in range(6)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(DEADLINE_S)
            assert not worker.is_alive()
        assert shm.stats.lookups_failed == 0
    assert wrong == []


def test_many_sessions_at_once(daemon: Daemon, shared_rows: np.ndarray) -> None:
    clients = [client(daemon, max_rows_per_slot=64) for _ in range(24)]
    try:
        assert sessions(daemon) == 24
        for number, shm in enumerate(clients):
            assert shm.region is not None
            assert shm.lookup([number]) == shared_rows[number].tobytes()
    finally:
        for shm in clients:
            shm.close()


# -- sessions ----------------------------------------------------------------------------------------------


def test_a_prefetch_belongs_to_its_session(daemon: Daemon) -> None:
    span = table_pb2.TokenSpan(tokens_le32=np.arange(200_000, dtype="<i4").tobytes())
    with peer(daemon, attach=False) as one:
        request = PrefetchRequest(session_token=one.token, request_id="a", span=span)
        accepted = [daemon.stub.Prefetch(request, timeout=DEADLINE_S).accepted]
        for number in range(64):
            request.request_id = f"r{number}"
            accepted.append(daemon.stub.Prefetch(request, timeout=DEADLINE_S).accepted)
        assert accepted[0]
        assert not all(accepted), "a session has no more than its share of the queue"
    eventually(lambda: daemon.metric("ple_daemon_prefetch_queue") == 0, "prefetches gone with the session")
    cancel = CancelPrefetchRequest(session_token=one.token, request_id="a")
    with pytest.raises(grpc.RpcError) as failure:
        daemon.stub.CancelPrefetch(cancel, timeout=DEADLINE_S)
    assert failure.value.code() is Code.FAILED_PRECONDITION


def test_attach_refuses_another_table(daemon: Daemon) -> None:
    with pytest.raises(grpc.RpcError) as failure:
        next(daemon.stub.Attach(AttachRequest(expected_fingerprint=b"x" * 32), timeout=DEADLINE_S))
    assert failure.value.code() is Code.FAILED_PRECONDITION


def test_sessions_have_a_limit(daemon: Daemon) -> None:
    streams = []
    try:
        for _ in range(32):
            streams.append(daemon.stub.Attach(AttachRequest(), timeout=DEADLINE_S))
            next(streams[-1])
        streams.append(daemon.stub.Attach(AttachRequest(), timeout=DEADLINE_S))
        with pytest.raises(grpc.RpcError) as failure:
            next(streams[-1])
        assert failure.value.code() is Code.RESOURCE_EXHAUSTED
    finally:
        for stream in streams:
            stream.cancel()


def test_coming_and_going_leaves_nothing(daemon: Daemon) -> None:
    def come_and_go(times: int) -> None:
        for number in range(times):
            with peer(daemon, max_rows=8) as one:
                if number % 2:
                    assert one.ask(0, [number]) is Code.OK
                if number % 3 == 0:
                    one.socket.close()
        eventually(lambda: is_clean(daemon), "all gone")

    come_and_go(70)  # the pool has its threads now
    before = descriptors(daemon), threads(daemon)
    come_and_go(200)
    eventually(lambda: descriptors(daemon) <= before[0] + 2, "descriptors as before")
    assert threads(daemon) <= before[1] + 2


KILLED = """
import sys, time
from ple_rpc.client import TableClient
client = TableClient(sys.argv[1])
client.lookup([1])
print("attached", flush=True)
while True:
    client.lookup(range(8000))
"""


def test_a_killed_client_leaves_nothing(daemon: Daemon) -> None:
    command = [sys.executable, "-c", KILLED, f"unix:{daemon.socket}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "attached\n"
        assert sessions(daemon) == 1
        process.kill()
    eventually(lambda: is_clean(daemon), "session of the killed client gone")


# -- what regions must be ----------------------------------------------------------------------------------

FIT = RegionLayout(4, 1024, 320)
BAD_REGIONS = {
    "unsealed": ({"seals": 0}, Code.INVALID_ARGUMENT, "not sealed"),
    "can shrink": ({"seals": F_SEAL_GROW | F_SEAL_SEAL}, Code.INVALID_ARGUMENT, "not sealed"),
    "can grow": ({"seals": F_SEAL_SHRINK | F_SEAL_SEAL}, Code.INVALID_ARGUMENT, "not sealed"),
    # d12: what a client registers for reading alone cannot take rows.
    "read-only": ({"seals": SEALS | F_SEAL_FUTURE_WRITE}, Code.INVALID_ARGUMENT, "sealed against writing"),
    "can be sealed": ({"seals": F_SEAL_SHRINK | F_SEAL_GROW}, Code.INVALID_ARGUMENT, "not sealed"),
    "short": ({"size": FIT.size_bytes - 4096}, Code.INVALID_ARGUMENT, "its header asks for"),
    "long": ({"size": FIT.size_bytes + 4096}, Code.INVALID_ARGUMENT, "its header asks for"),
    "tiny": ({"size": 16, "header": b""}, Code.INVALID_ARGUMENT, "header has 16 bytes"),
    "no header": ({"header": b""}, Code.INVALID_ARGUMENT, "does not start with a header"),
    "too few slots": ({"header": (3, 1024, 320)}, Code.INVALID_ARGUMENT, "at least 4 slots"),
    "huge slot count": ({"header": (2**32 - 1, 1024, 320)}, Code.RESOURCE_EXHAUSTED, "at most 16"),
    "huge slots": ({"header": (4, 2**32 - 1, 320)}, Code.RESOURCE_EXHAUSTED, "at most 16"),
    "huge region": ({"header": (16, 2**18, 320)}, Code.RESOURCE_EXHAUSTED, "a region of"),
    "no rows": ({"header": (4, 0, 320)}, Code.INVALID_ARGUMENT, "one row"),
    "wide rows": ({"header": (4, 1024, 321)}, Code.INVALID_ARGUMENT, "rows of 321 bytes"),
    "another table": ({"header": (4, 1024, 320, b"x" * 32)}, Code.FAILED_PRECONDITION, "another table"),
}


@pytest.mark.parametrize(("changes", "code", "words"), BAD_REGIONS.values(), ids=BAD_REGIONS)
def test_bad_regions_are_refused(daemon: Daemon, changes: dict, code: grpc.StatusCode, words: str) -> None:
    with peer(daemon, attach=False) as one:
        header = changes.get("header")
        if isinstance(header, tuple):
            fingerprint = header[3] if len(header) > 3 else one.described.fingerprint
            changes = changes | {"header": RegionLayout(*header[:3]).header(fingerprint)}
        one.make_region(**changes)
        status, reason = one.greet()
        assert (status, words in reason) == (code.value[0], True), reason


def test_d12_a_descriptor_for_reading_is_refused(daemon: Daemon) -> None:
    with peer(daemon, attach=False) as one:
        one.make_region()
        read_only = os.open(f"/proc/self/fd/{one.fd}", os.O_RDONLY)
        status, reason = one.greet(fds=[read_only])
        os.close(read_only)
        assert (status, "Permission denied" in reason) == (Code.UNAVAILABLE.value[0], True), reason


def test_other_descriptors_are_refused(daemon: Daemon, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(FIT.size_bytes))
    null = Path("/dev/null")
    with (tmp_path / "file").open("r+b") as file, null.open() as null, peer(daemon, attach=False) as one:
        for fds in ([file.fileno()], [null.fileno()], [], [null.fileno()] * 2, [null.fileno()] * 60):
            status, _ = one.greet(fds=fds)
            assert status == Code.INVALID_ARGUMENT.value[0]
            one.socket.close()
            one.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            one.socket.settimeout(DEADLINE_S)
            one.socket.connect(one.described.doorbell_path)


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (bell.greeting(b"0" * 16), Code.FAILED_PRECONDITION),
        (b"hello", Code.INVALID_ARGUMENT),
        (b"x" * bell.GREETING_BYTES, Code.INVALID_ARGUMENT),
        (b"x" * 5000, Code.INVALID_ARGUMENT),
    ],
)
def test_bad_greetings_are_refused(daemon: Daemon, message: bytes, code: grpc.StatusCode) -> None:
    with peer(daemon, attach=False) as one:
        one.make_region()
        assert one.greet(message)[0] == code.value[0]
        assert one.is_cut_off()


def test_a_session_has_one_region(daemon: Daemon) -> None:
    with peer(daemon) as one, peer(daemon, attach=False) as other:
        other.token = one.token
        other.make_region()
        assert other.greet()[0] == Code.INVALID_ARGUMENT.value[0]
        assert one.ask(0, [1]) is Code.OK


def test_connections_that_say_nothing_are_dismissed_and_hold_nobody_up(daemon: Daemon) -> None:
    path = daemon.run_dir / "bell.sock"
    before = descriptors(daemon)
    silent = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(80)]
    for connection in silent:
        connection.connect(str(path))
    eventually(lambda: descriptors(daemon) <= before + 4, "silent connections dismissed")
    with peer(daemon) as one:
        assert one.ask(0, [1]) is Code.OK
    for connection in silent:
        connection.close()


# -- attacks after attaching -------------------------------------------------------------------------------


def test_only_asked_for_memory_is_written(daemon: Daemon, shared_rows: np.ndarray) -> None:
    with peer(daemon) as one:
        header = bytes(one.map[:4096])
        assert one.ask(1, [7, 9]) is Code.OK
        assert np.array_equal(one.rows(1, 2), shared_rows[[7, 9]])
        assert set(one.rows(1, 1024)[2:].tobytes()) == {0xA5}
        assert one.head(1) == (1, 0, 0)
        assert [one.is_poisoned(slot) for slot in (0, 1, 2, 3)] == [True, False, True, True]
        assert bytes(one.map[:4096]) == header


def test_the_header_is_read_once(daemon: Daemon, shared_rows: np.ndarray) -> None:
    with peer(daemon) as one:
        one.map[:4096] = RegionLayout(16, 2**18, 320).header(b"x" * 32).ljust(4096, b"\xff")
        assert one.ask(3, [11]) is Code.OK
        assert np.array_equal(one.rows(3, 1), shared_rows[[11]])
        one.ring(4, 1)
        assert one.answer()[1] is Code.INVALID_ARGUMENT


@pytest.mark.parametrize("slot", [4, 16, 17, 2**32 - 1])
def test_slots_out_of_range_are_refused(daemon: Daemon, slot: int) -> None:
    with peer(daemon) as one:
        sequence = one.ring(slot, 1)
        assert one.answer() == (slot, Code.INVALID_ARGUMENT, sequence)
        assert all(one.is_poisoned(other) for other in range(4))


@pytest.mark.parametrize("rows", [1025, 2**31, 2**32 - 1])
def test_more_rows_than_a_slot_holds_are_refused(daemon: Daemon, rows: int) -> None:
    with peer(daemon) as one:
        one.ring(0, rows)
        assert one.answer()[1] is Code.RESOURCE_EXHAUSTED
        assert set(one.rows(0, 1024).tobytes()) == {0xA5}


def test_old_sequences_are_refused_and_touch_nothing(daemon: Daemon) -> None:
    with peer(daemon) as one:
        assert one.ask(0, [1]) is Code.OK
        head, rows = one.head(0), one.rows(0, 1)
        one.put(0, [2])
        for sequence in (1, 0, -5, -(2**63)):
            one.ring(0, 1, sequence)
            assert one.answer() == (0, Code.INVALID_ARGUMENT, sequence)
        assert one.head(0) == head
        assert np.array_equal(one.rows(0, 1), rows)
        assert one.ask(0, [2]) is Code.OK


def test_a_slot_in_use_is_refused(daemon: Daemon) -> None:
    with peer(daemon, max_rows=2**17) as one:
        rows = one.put(0, np.arange(2**17) % 33_000)
        first, second = one.ring(0, rows), one.ring(0, 1)
        answers = {of: status for _, status, of in (one.answer(), one.answer())}
        assert answers == {first: Code.OK, second: Code.INVALID_ARGUMENT}


@pytest.mark.parametrize("rows", [64, 1024])
def test_ids_rewritten_after_the_ring(daemon: Daemon, shared_rows: np.ndarray, rows: int) -> None:
    """Whatever the daemon caught, it either refuses or delivers rows of the table."""
    with peer(daemon) as one:
        start = one.layout.slot_offset_bytes(0) + one.layout.ids_offset_bytes
        ids = np.frombuffer(one.map, np.int64, rows, start)
        known = {row.tobytes() for row in shared_rows}
        stop = threading.Event()

        def rewrite() -> None:
            values = [2**62, -1, 5, len(shared_rows), 7]
            while not stop.is_set():
                for value in values:
                    ids[:] = value

        writer = threading.Thread(target=rewrite)
        writer.start()
        try:
            seen = set()
            deadline = time.monotonic() + 20
            while len(seen) < 2 and time.monotonic() < deadline:
                one.ring(0, rows)
                seen.add(one.answer()[1])
                if one.head(0)[1] == 0:
                    assert all(row.tobytes() in known for row in one.rows(0, rows))
        finally:
            stop.set()
            writer.join()
        assert seen <= {Code.OK, Code.OUT_OF_RANGE}


@pytest.mark.parametrize("message", [b"", b"x", b"x" * 15, b"x" * 17, b"x" * 4000])
def test_other_messages_end_the_region(daemon: Daemon, message: bytes) -> None:
    with peer(daemon) as one:
        one.socket.send(message)
        assert one.is_cut_off()
        eventually(lambda: region_maps(daemon) == 0, "region unmapped")
        assert sessions(daemon) == 1


def test_a_client_that_never_reads_is_cut_off_and_delays_nobody(daemon: Daemon) -> None:
    with peer(daemon) as deaf, client(daemon) as good:
        deaf.put(0, [1])
        deaf.socket.setblocking(False)
        cut = False
        deadline = time.monotonic() + DEADLINE_S
        while not cut and time.monotonic() < deadline:
            try:
                deaf.ring(0, 1)
            except BlockingIOError:
                good.lookup([1])
            except (BrokenPipeError, ConnectionError):
                cut = True
        assert cut
        eventually(lambda: daemon.metric("ple_daemon_shm_regions") == 1, "region of the deaf client gone")
        assert len(good.lookup(range(16))) == 16 * 320


def test_decode_is_served_while_another_floods_bulk(daemon: Daemon, shared_rows: np.ndarray) -> None:
    with peer(daemon, slots=16, max_rows=2**15) as flood, client(daemon) as good:
        ids = np.arange(2**15) % len(shared_rows)
        stop = threading.Event()
        floods = []

        def pour() -> None:
            for slot in range(16):
                flood.ring(slot, flood.put(slot, ids))
            while not stop.is_set():
                slot, status, _ = flood.answer()
                floods.append(status)
                flood.ring(slot, len(ids))

        pourer = threading.Thread(target=pour)
        pourer.start()
        try:
            eventually(lambda: len(floods) > 2, "flood under way")
            answered = len(floods)
            for _ in range(200):
                assert good.lookup([3] * 16) == shared_rows[[3] * 16].tobytes()
            # Sixteen chunks of 10 MiB wait; a decode step that queued behind them would see some 16 a step.
            assert len(floods) - answered < 200
            assert good.lookup(range(1000)) == shared_rows[:1000].tobytes()
        finally:
            stop.set()
            pourer.join(DEADLINE_S)
        assert set(floods) == {Code.OK}


def test_closing_in_the_middle_of_a_lookup(daemon: Daemon) -> None:
    for _ in range(10):
        with peer(daemon, slots=16, max_rows=2**14) as one:
            for slot in range(16):
                one.ring(slot, one.put(slot, np.arange(2**14)))


def test_a_region_with_holes_is_served(daemon: Daemon, shared_rows: np.ndarray) -> None:
    """Seals do not forbid punching holes: the daemon's writes then make new pages."""
    with peer(daemon) as one:
        libc = ctypes.CDLL(None, use_errno=True)
        size = ctypes.c_long(one.layout.size_bytes)
        assert libc.fallocate(one.fd, _KEEP_SIZE | _PUNCH_HOLE, ctypes.c_long(0), size) == 0
        assert one.ask(2, [9]) is Code.OK
        assert np.array_equal(one.rows(2, 1), shared_rows[[9]])
