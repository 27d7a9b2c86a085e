"""A step's rows from a real daemon, with CUDA's part played by the CPU."""

import os
import signal
import threading
import time
from contextlib import nullcontext

import pytest
import torch
from cuda_on_cpu import MAX_IDS, ROW_BYTES, SLOTS, Daemon, Event, delivered

from ple_rpc.client import ClientOptions, TableClient
from ple_rpc.errors import BadRow, TableUnavailable


@pytest.fixture
def make_source(upstream, fresh_plugin, cudart, monkeypatch):
    upstream("vllm.utils.gpu_sync_debug", gpu_sync_allowed=nullcontext)
    from ple_inference.vllm_plugin import row_source, staged_rows

    monkeypatch.setattr(staged_rows, "pinned", lambda size, dtype: torch.full((size,), 77, dtype=dtype))
    made = []

    def make(daemon: Daemon, **options):
        options = {"slots": SLOTS, "max_rows_per_slot": MAX_IDS, "hang_check_s": 0.3} | options
        client = TableClient(daemon.address, ClientOptions(**options))
        client.wait_ready(60)
        made.append(row_source.RowSource(client, MAX_IDS, ROW_BYTES, SLOTS))
        return made[-1]

    yield make
    for source in made:
        source.close()


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
    assert len(source._copies) < SLOTS


def test_without_shared_memory_rows_come_over_grpc(make_source, steady, cudart) -> None:
    source = make_source(steady, slots=0)
    for ids in ([9], list(range(500, 900))):
        assert delivered(source, ids) == ids
    assert cudart.registered == {}


def test_a_bad_id_raises_and_leaves_the_buffer(make_source, steady) -> None:
    source = make_source(steady)
    rows = torch.full((2, ROW_BYTES), 0xA5, dtype=torch.uint8)
    for bad in (-1, 1 << 40):
        with pytest.raises(BadRow):
            source.deliver(torch.tensor([[3], [bad]]), rows)
        assert (rows == 0xA5).all()
    assert delivered(source, [3]) == [3]


def test_steps_go_on_across_kills_and_a_stop(make_source, mortal, cudart) -> None:
    source = make_source(mortal)
    assert delivered(source, [1, 2]) == [1, 2]
    (first,) = cudart.registered
    for step in range(3):
        mortal.kill()
        mortal.start()
        assert delivered(source, [100 + step, step]) == [100 + step, step]
    assert len(cudart.registered) == 1  # the regions of dead daemons are let go
    mortal.stop()
    threading.Timer(1.0, os.kill, (mortal.process.pid, signal.SIGCONT)).start()
    assert delivered(source, list(range(600))) == list(range(600))
    assert source._client.stats.reconnects >= 3
    assert first not in cudart.registered or len(cudart.registered) == 1


def test_a_daemon_that_stays_away_ends_the_step(make_source, mortal) -> None:
    source = make_source(mortal, lookup_deadline_s=1.5)
    assert delivered(source, [1]) == [1]
    mortal.kill()
    rows = torch.full((1, ROW_BYTES), 0xA5, dtype=torch.uint8)
    start_s = time.monotonic()
    with pytest.raises(TableUnavailable, match=r"no rows from unix:.* in 1\.5 s"):
        source.deliver(torch.tensor([[4]]), rows)
    assert time.monotonic() - start_s < 30
    assert (rows == 0xA5).all()


def test_a_driver_that_refuses_says_what_to_look_at(make_source, steady, cudart) -> None:
    source = make_source(steady)
    cudart.refuses = True
    with pytest.raises(RuntimeError, match=r"CUDA does not register \d+ bytes of shared memory \(error 2\)"):
        delivered(source, [1])
