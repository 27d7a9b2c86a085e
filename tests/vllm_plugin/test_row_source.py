"""A step's rows from a real daemon: the CPU plays CUDA's streams, the host function is real."""

import gc
import os
import random
import signal
import struct
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from cuda_on_cpu import MAX_IDS, ROW_BYTES, SLOTS, Daemon, Event, delivered, poisoned
from waiting import wait_for

from ple_inference.tiny.weights import row_numbers
from ple_inference.vllm_plugin.native_ring import Word, ring_word
from ple_rpc.client import ClientOptions, TableClient
from ple_rpc.errors import BadRow, TableError, TableUnavailable


@pytest.fixture
def make_source(upstream, fresh_plugin, cuda, cudart, monkeypatch):
    upstream("vllm.utils.gpu_sync_debug", gpu_sync_allowed=nullcontext)
    from ple_inference.vllm_plugin import row_source, staged_rows

    monkeypatch.setattr(staged_rows, "pinned", lambda size, dtype: torch.full((size,), 77, dtype=dtype))
    monkeypatch.setattr(row_source, "launch_host_function", cuda.launch_host_function)
    made = []

    def make(daemon: Daemon, give_up=None, **options):
        options = {"slots": SLOTS, "max_rows_per_slot": MAX_IDS, "hang_check_s": 0.3} | options
        client = TableClient(daemon.address, ClientOptions(**options))
        client.wait_ready(60)
        errors: list[TableError] = []
        there = Event(external=True)
        source = row_source.RowSource(client, MAX_IDS, ROW_BYTES, 0.3, there, give_up or errors.append)
        source.errors, source.rows_there = errors, there
        made.append(source)
        return source

    yield make
    for source in made:
        source.close()
    assert "ple-rescue" not in Event.touched_by  # it would wait for the stream that waits for it


def test_rows_arrive_in_the_order_of_their_ids(make_source, steady, cudart) -> None:
    source = make_source(steady)
    for ids in ([0], [5, 5, 3], list(range(31_900, 31_000, -1)), list(range(MAX_IDS))):
        assert delivered(source, ids) == ids
    (size,) = cudart.registered.values()
    assert size >= SLOTS * MAX_IDS * (ROW_BYTES + 8)


def test_a_step_larger_than_a_slot_takes_several(make_source, steady) -> None:
    source = make_source(steady, max_rows_per_slot=16)
    for count in (16, 17, 1000, 1):
        assert delivered(source, list(range(count))) == list(range(count))
    assert source.deliveries == 4
    assert source._client.stats.lookups == 0  # none of them over gRPC


def test_a_step_without_tokens_asks_for_nothing(make_source, steady) -> None:
    source = make_source(steady)
    source.connect()
    assert delivered(source, []) == []
    assert all(record[Word.SEQUENCE] == 0 for record in source._slots._records)


def test_close_waits_for_what_is_on_the_stream(make_source, mortal) -> None:
    source = make_source(mortal)
    assert delivered(source, [1]) == [1]
    mortal.stop()
    rows = poisoned(1)
    source.deliver(torch.tensor([[8]]), rows)
    threading.Timer(0.8, os.kill, (mortal.process.pid, signal.SIGCONT)).start()
    source.close()
    assert row_numbers(rows.view(torch.bfloat16)).tolist() == [8]
    source.close()  # its descriptors are others' by now: a second time must not touch them


def test_the_step_does_not_wait_for_its_rows(make_source, mortal) -> None:
    source = make_source(mortal)
    assert delivered(source, [1]) == [1]
    mortal.stop()
    rows = poisoned(2)
    source.deliver(torch.tensor([[8], [9]]), rows)  # returns: the forward can be launched
    assert (rows == 0xA5).all()
    mortal.process.send_signal(signal.SIGCONT)
    source.rows_there.wait()
    torch.cuda.current_stream().synchronize()
    assert row_numbers(rows.view(torch.bfloat16)).tolist() == [8, 9]


def test_rows_stay_until_the_step_before_has_read_them(make_source, steady) -> None:
    source = make_source(steady)
    rows, seen = poisoned(1), []
    has_read = threading.Event()
    source.deliver(torch.tensor([[5]]), rows)
    source.rows_there.wait()
    forward = torch.cuda.current_stream()
    forward.submit(lambda: has_read.wait(30))
    forward.submit(lambda: seen.append(rows.clone()))
    source.deliver(torch.tensor([[6]]), rows)
    has_read.set()
    source.rows_there.wait()
    forward.submit(lambda: seen.append(rows.clone()))
    forward.synchronize()
    assert [row_numbers(row.view(torch.bfloat16)).item() for row in seen] == [5, 6]


def test_a_slot_is_used_again_only_after_the_copy_out_of_it(make_source, steady) -> None:
    source = make_source(steady)
    gate, kept = threading.Event(), [poisoned(2) for _ in range(SLOTS + 1)]
    source.connect()
    source._stream.submit(lambda: gate.wait(30))
    for step in range(SLOTS):
        source.deliver(torch.tensor([[step], [7]]), kept[step])
    more = threading.Thread(target=source.deliver, args=(torch.tensor([[SLOTS], [7]]), kept[SLOTS]))
    more.start()
    assert all((rows == 0xA5).all() for rows in kept)
    gate.set()
    more.join(30)
    source._stream.synchronize()
    assert [row_numbers(rows.view(torch.bfloat16)).tolist() for rows in kept] == [
        [step, 7] for step in range(SLOTS + 1)
    ]


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
    rows = poisoned(2)
    source.deliver(torch.tensor([[3], [1 << 40]]), rows)
    assert ended.wait(30)
    assert isinstance(errors[0], BadRow)
    # The stream waits for ever at such a step: it must never go on without rows.
    assert (rows == 0xA5).all()
    let_go(source)


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


def test_no_garbage_is_collected_while_the_stream_waits(make_source, mortal, monkeypatch) -> None:
    """A finaliser that calls CUDA would wait for that stream, and keep the interpreter's lock."""
    source = make_source(mortal)
    collects, look_up = [], source._client.lookup
    monkeypatch.setattr(
        source._client, "lookup", lambda *given: (collects.append(gc.isenabled()), look_up(*given))
    )
    assert delivered(source, [1]) == [1]
    mortal.stop()
    threading.Timer(0.6, os.kill, (mortal.process.pid, signal.SIGCONT)).start()
    assert delivered(source, [2]) == [2]
    assert collects == [False]
    wait_for(gc.isenabled, "collection of garbage again")


def test_rows_are_right_whatever_happens_to_the_daemon_and_when(make_source, mortal) -> None:
    """Ended, killed or stopped while steps go on, at moments that a seed draws."""
    source, rng = make_source(mortal), random.Random(1)
    steps, faults = 0, [signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM]
    rng.shuffle(faults)
    disturbing: threading.Thread | None = None
    while faults or disturbing is not None:
        if disturbing is None:
            disturbing = threading.Thread(target=disturb, args=(mortal, faults.pop(), rng.uniform(0, 0.02)))
            disturbing.start()
        elif not disturbing.is_alive():
            disturbing = None
        ids = [rng.randrange(31_000) for _ in range(rng.choice([1, 16, 600]))]
        assert delivered(source, ids) == ids
        steps += 1
    assert source.errors == []
    assert steps > 5


def disturb(daemon: Daemon, fault: signal.Signals, after_s: float) -> None:
    threading.Event().wait(after_s)
    if fault == signal.SIGSTOP:
        daemon.stop()
        threading.Event().wait(after_s + 0.4)  # longer than an answer may take
        daemon.process.send_signal(signal.SIGCONT)
        return
    daemon.process.send_signal(fault)
    daemon.process.wait(60)
    daemon.start()


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


def test_when_all_slots_are_lost_a_new_session_has_others(make_source, mortal, cudart) -> None:
    """Four slow answers in an engine's life must not cost it shared memory for good."""
    source = make_source(mortal, hang_check_s=5.0)
    assert delivered(source, [1]) == [1]
    session = source._slots
    for step in range(SLOTS):
        mortal.stop()
        threading.Timer(0.6, os.kill, (mortal.process.pid, signal.SIGCONT)).start()
        assert delivered(source, [step, 9]) == [step, 9]
    assert len(session.given_up) == SLOTS
    for step in range(3 * SLOTS):
        assert delivered(source, [step, 9]) == [step, 9]
    assert source._slots is not session
    assert len(source._slots.given_up) < SLOTS
    assert len(cudart.registered) == 1
    assert source._client.stats.reconnects == 1
    assert source.errors == []


def test_a_daemon_that_stays_away_ends_the_process(make_source, mortal) -> None:
    ended = threading.Event()
    source = make_source(
        mortal, give_up=lambda error: (errors.append(error), ended.set()), lookup_deadline_s=1.5
    )
    errors: list[TableError] = []
    assert delivered(source, [1]) == [1]
    mortal.stop()  # the client has not noticed when the step is on the stream
    rows = poisoned(1)
    source.deliver(torch.tensor([[4]]), rows)
    assert ended.wait(30)
    assert isinstance(errors[0], TableUnavailable)
    assert (rows == 0xA5).all()
    let_go(source)


def test_a_daemon_that_is_known_to_be_gone_ends_the_step(make_source, mortal) -> None:
    source = make_source(mortal, lookup_deadline_s=1.5)
    assert delivered(source, [1]) == [1]
    mortal.kill()
    wait_for(lambda: source._client.region is None, "notice of the end")
    rows = poisoned(1)
    with pytest.raises(TableUnavailable, match=r"no answer from unix:.* in 1\.5 s"):
        source.deliver(torch.tensor([[4]]), rows)
    assert (rows == 0xA5).all()


def let_go(source) -> None:
    """End a step whose rows never come."""
    for slot in source._slots.slots:
        if slot.is_missed:
            slot.resume()


def test_the_process_really_ends(tmp_path: Path) -> None:
    code = (
        "import threading, sys, types; "
        "sys.modules['vllm.utils.gpu_sync_debug'] = types.SimpleNamespace(gpu_sync_allowed=None); "
        "from ple_inference.vllm_plugin.row_source import end_process; "
        "threading.Thread(target=end_process, args=(None,)).start(); threading.Event().wait()"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 1


def test_a_driver_that_refuses_says_what_to_look_at(make_source, steady, cudart) -> None:
    source = make_source(steady)
    cudart.refuses = True
    with pytest.raises(RuntimeError, match=r"CUDA does not register \d+ bytes of host memory \(error 2\)"):
        delivered(source, [1])
