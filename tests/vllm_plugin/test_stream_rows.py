"""Rows that the stream fetches, from a real daemon: the CPU plays the stream, the host function is real."""

import ctypes
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from cuda_on_cpu import MAX_IDS, ROW_BYTES, SLOTS, Daemon, Event, delivered

from ple_inference.vllm_plugin.native_ring import Word, ring_word
from ple_rpc.client import ClientOptions, TableClient
from ple_rpc.errors import BadRow, TableError, TableUnavailable


@pytest.fixture
def make_source(upstream, fresh_plugin, cudart, monkeypatch):
    upstream("vllm.utils.gpu_sync_debug", gpu_sync_allowed=nullcontext)
    from ple_inference.vllm_plugin import staged_rows, stream_rows

    monkeypatch.setattr(staged_rows, "pinned", lambda size, dtype: torch.full((size,), 77, dtype=dtype))
    monkeypatch.setattr(stream_rows, "launch_host_function", call_now)
    made = []

    def make(daemon: Daemon, give_up=None, **options):
        options = {"slots": SLOTS, "max_rows_per_slot": MAX_IDS, "hang_check_s": 0.3} | options
        client = TableClient(daemon.address, ClientOptions(**options))
        client.wait_ready(60)
        given_up: list[TableError] = []
        made.append(stream_rows.StreamRows(client, MAX_IDS, ROW_BYTES, 0.3, give_up or given_up.append))
        made[-1].errors = given_up
        return made[-1]

    yield make
    for source in made:
        source.close()


def call_now(function: int, argument: int) -> None:
    """What the stream does with a host function, without a stream; ctypes lets other threads run."""
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)(argument)


def test_rows_arrive_in_the_order_of_their_ids(make_source, steady, cudart) -> None:
    source = make_source(steady)
    for ids in ([0], [5, 5, 3], list(range(31_900, 31_000, -1)), list(range(MAX_IDS))):
        assert delivered(source, ids) == ids
    (size,) = cudart.registered.values()
    assert size >= SLOTS * MAX_IDS * (ROW_BYTES + 8)


def test_more_steps_than_slots_while_copies_are_under_way(make_source, steady, monkeypatch) -> None:
    monkeypatch.setattr(Event, "pending", True)
    source = make_source(steady)
    for step in range(5 * SLOTS):
        assert delivered(source, [step, 7]) == [step, 7]
    assert Event.waits == 5 * SLOTS - SLOTS  # each slot's next use waits for the copy out of it


def test_without_shared_memory_rows_come_over_grpc(make_source, steady, cudart) -> None:
    source = make_source(steady, slots=0)
    for ids in ([9], list(range(500, 900))):
        assert delivered(source, ids) == ids
    assert cudart.registered == {}


def test_rows_that_cannot_be_had_end_the_process_and_not_the_wait(make_source, steady) -> None:
    """An id that the table does not have stands for whatever no repetition mends."""
    ended = threading.Event()
    source = make_source(steady, give_up=lambda error: (errors.append(error), ended.set()))
    errors: list[TableError] = []
    rows = torch.full((2, ROW_BYTES), 0xA5, dtype=torch.uint8)
    # The stream waits for ever at such a step: it must never go on without rows.
    step = threading.Thread(target=source.deliver, args=(torch.tensor([[3], [1 << 40]]), rows), daemon=True)
    step.start()
    assert ended.wait(30)
    assert isinstance(errors[0], BadRow)
    assert step.is_alive()
    assert (rows == 0xA5).all()
    let_go(source, step)


def test_a_late_answer_is_not_taken_for_another(make_source, steady) -> None:
    """The daemon answers one ring twice over, as it were: sequences tell."""
    source = make_source(steady)
    assert delivered(source, [4, 5]) == [4, 5]
    for record in source._slots._records:
        record[Word.SEQUENCE] += 7  # the daemon's next answers carry these
    # An answer that nobody waits for any more lies in the socket.
    stale = source._slots.slots[1]
    stale.ask(1)
    stale.ids[:] = 9
    stale.copied.record()
    os.write(source._slots._memory.bell_fd, struct.pack("<qq", ring_word(1, 1), stale.record[Word.SEQUENCE]))
    stale.record[Word.SEQUENCE] += 1
    for step in range(3 * SLOTS):
        assert delivered(source, [step, 30_000]) == [step, 30_000]
    assert source._client.stats.lookups == 0  # none had to be rescued


def test_steps_go_on_across_kills_and_a_stop(make_source, mortal, cudart) -> None:
    source = make_source(mortal)
    assert delivered(source, [1, 2]) == [1, 2]
    for step in range(3):
        mortal.kill()
        mortal.start()
        assert delivered(source, [100 + step, step]) == [100 + step, step]
        assert delivered(source, [step]) == [step]
        assert len(cudart.registered) == 1  # the regions of dead daemons are let go
    mortal.stop()
    threading.Timer(1.0, os.kill, (mortal.process.pid, signal.SIGCONT)).start()
    assert delivered(source, list(range(600))) == list(range(600))
    for step in range(3 * SLOTS):
        assert delivered(source, [step]) == [step]
    assert source._client.stats.reconnects >= 3
    assert source.errors == []


def test_a_slow_answer_costs_its_slot(make_source, mortal) -> None:
    """The daemon lives and is late: its rows may still be written, so the slot is not used again."""
    source = make_source(mortal, hang_check_s=5.0)
    assert delivered(source, [1]) == [1]
    session = source._slots
    mortal.stop()
    threading.Timer(0.8, os.kill, (mortal.process.pid, signal.SIGCONT)).start()
    assert delivered(source, [2, 3]) == [2, 3]
    assert source._slots is session
    assert len(session.given_up) == 1
    for step in range(3 * SLOTS):
        assert delivered(source, [step, 31_000]) == [step, 31_000]
    assert len(session.given_up) == 1


def test_when_all_slots_are_lost_rows_come_over_grpc(make_source, steady) -> None:
    source = make_source(steady)
    assert delivered(source, [1]) == [1]
    source._slots.given_up.update(range(SLOTS))
    for step in range(4):
        assert delivered(source, [step, 9]) == [step, 9]


def test_a_daemon_that_stays_away_ends_the_process(make_source, mortal) -> None:
    ended = threading.Event()
    source = make_source(
        mortal, give_up=lambda error: (errors.append(error), ended.set()), lookup_deadline_s=1.5
    )
    errors: list[TableError] = []
    assert delivered(source, [1]) == [1]
    mortal.stop()  # the client has not noticed when the step is on the stream
    rows = torch.full((1, ROW_BYTES), 0xA5, dtype=torch.uint8)
    step = threading.Thread(target=source.deliver, args=(torch.tensor([[4]]), rows), daemon=True)
    step.start()
    assert ended.wait(30)
    assert isinstance(errors[0], TableUnavailable)
    assert step.is_alive()
    assert (rows == 0xA5).all()
    let_go(source, step)


def test_a_daemon_that_is_known_to_be_gone_ends_the_step(make_source, mortal) -> None:
    source = make_source(mortal, lookup_deadline_s=1.5)
    assert delivered(source, [1]) == [1]
    mortal.kill()
    wait_until(lambda: source._client.region is None)
    rows = torch.full((1, ROW_BYTES), 0xA5, dtype=torch.uint8)
    with pytest.raises(TableUnavailable, match=r"no answer from unix:.* in 1\.5 s"):
        source.deliver(torch.tensor([[4]]), rows)
    assert (rows == 0xA5).all()


def let_go(source, step: threading.Thread) -> None:
    """End a step that waits for rows which never come."""
    for slot in source._slots.slots:
        if slot.is_missed:
            slot.resume()
    step.join(30)
    assert not step.is_alive()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_process_really_ends(tmp_path: Path) -> None:
    code = (
        "import threading, sys, types; "
        "sys.modules['vllm.utils.gpu_sync_debug'] = types.SimpleNamespace(gpu_sync_allowed=None); "
        "from ple_inference.vllm_plugin.stream_rows import end_process; "
        "threading.Thread(target=end_process, args=(None,)).start(); threading.Event().wait()"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 1


def test_a_driver_that_refuses_says_what_to_look_at(make_source, steady, cudart) -> None:
    source = make_source(steady)
    cudart.refuses = True
    with pytest.raises(RuntimeError, match=r"CUDA does not register \d+ bytes of shared memory \(error 2\)"):
        delivered(source, [1])
