"""Sampled tokens between stages, by vLLM's own exchange on played streams, with the stream settled or not."""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ple_inference.vllm_plugin.overrides import pp_step_stream

TOKENS, POISON = [4242, 1717], -0x5A5A
FIRST, LAST = (SimpleNamespace(is_last_rank=is_last, last_rank=1, world_size=2) for is_last in (False, True))


@dataclass
class Stage:
    """One rank's handler, and the gate that holds back what the test wants late."""

    handler: object
    batch: object
    gate: threading.Event
    sent: list[list[int]]

    def on_step_stream(self, work: Callable[[], object]) -> None:
        torch.cuda.current_stream().submit(work)


@pytest.fixture
def batch():
    """One decode step of two requests that both go on."""
    return SimpleNamespace(
        num_reqs=2,
        num_draft_tokens=0,
        num_computed_tokens_np=np.array([9, 12]),
        num_scheduled_tokens=np.array([1, 1]),
        prefill_len_np=np.array([5, 7]),
        is_prefilling_np=np.array([False, False]),
        max_seq_len_np=None,
        idx_mapping=torch.tensor([0, 1]),
        idx_mapping_np=np.array([0, 1]),
    )


@pytest.fixture
def stage(upstream, cuda, batch, monkeypatch):
    """Makes a rank's handler, settled before or not, and then calls current_stream as its model would."""
    gate, sent = threading.Event(), []
    empty = torch.empty
    platform = SimpleNamespace(is_rocm=lambda: False, is_cuda=lambda: True, is_xpu=lambda: False)
    upstream("vllm.platforms", current_platform=platform)
    streams = upstream(
        "vllm.utils.torch_utils",
        "_patched_set_stream",
        "current_stream",
        torch=torch,
        prev_set_stream=torch.cuda.set_stream,
        _current_stream_tls=threading.local(),
    )
    monkeypatch.setattr(torch.cuda, "set_stream", streams._patched_set_stream)
    monkeypatch.setattr(torch, "empty", lambda *size, **how: empty(*size, **how).fill_(POISON))

    def broadcast(tensor, src, group):
        """NCCL's: on the current stream, and the receiver's tokens come when the gate opens."""
        if group.is_last_rank:
            torch.cuda.current_stream().submit(lambda: sent.append(tensor.flatten().tolist()))
        elif tensor.dtype == torch.int64:
            torch.cuda.current_stream().submit(
                lambda: gate.wait(60) and tensor.view(-1).copy_(torch.tensor(TOKENS))
            )

    monkeypatch.setattr(torch.distributed, "broadcast", broadcast)

    def make(rank, *, settled: bool) -> Stage:
        group = SimpleNamespace(**vars(rank), make_sibling_device_group=lambda group_desc: rank)
        module = upstream(
            "vllm.v1.worker.gpu.pp_utils",
            "PendingRecv",
            "compute_need_sampled_mask",
            "PPHandler",
            dataclass=dataclass,
            deque=deque,
            np=np,
            torch=torch,
            get_pp_group=lambda: group,
            current_platform=platform,
        )
        if settled:
            pp_step_stream.install()
        handler = module.PPHandler(max_num_reqs=2, num_speculative_steps=0, device="cpu")
        streams.current_stream()
        return Stage(handler, batch, gate, sent)

    yield make
    gate.set()


def tokens_that_the_next_step_reads(stage: Stage, *, gate_opens_first: bool) -> list[int]:
    """Of the first rank: a step whose tokens are received, and the one, two steps later, that uses them."""
    seen: list[int] = []
    stage.handler.get_prev_sampled_outputs()
    stage.handler.receive(stage.batch, recv_drafts=False)
    assert stage.handler.get_prev_sampled_outputs() is None
    outputs = stage.handler.get_prev_sampled_outputs()
    stage.on_step_stream(lambda: seen.extend(outputs["sampled_tokens"].flatten().tolist()))
    if gate_opens_first:
        stage.gate.set()
    torch.cuda.current_stream().synchronize()
    return seen


def tokens_that_are_sent(stage: Stage, *, gate_opens_first: bool) -> list[int]:
    """Of the last rank: the sampler writes tokens on the step's stream, when the gate opens."""
    sampled = torch.full((2, 1), POISON)
    counts = torch.ones(2, dtype=torch.int32)
    stage.on_step_stream(lambda: stage.gate.wait(60) and sampled.copy_(torch.tensor(TOKENS).view(2, 1)))
    stage.handler.broadcast(sampled, counts, counts, stage.batch)
    if gate_opens_first:
        stage.gate.set()
    stage.handler.broadcast_stream.synchronize()
    return stage.sent[0]


EXCHANGES = [(FIRST, tokens_that_the_next_step_reads), (LAST, tokens_that_are_sent)]
SIDES = pytest.mark.parametrize(("rank", "exchange"), EXCHANGES, ids=["receives", "sends"])


@SIDES
def test_upstream_alone_does_not_wait_for_the_tokens(stage, rank, exchange):
    """What the override is for, and the gate never opens: when this fails, it can go."""
    assert exchange(stage(rank, settled=False), gate_opens_first=False) == [POISON, POISON]


@SIDES
def test_the_tokens_are_waited_for(stage, rank, exchange):
    made = stage(rank, settled=True)
    assert made.handler.main_stream is torch.cuda.current_stream()
    assert exchange(made, gate_opens_first=True) == TOKENS


def test_it_is_live_only_where_the_stream_is_settled(stage):
    stage(FIRST, settled=True)
    assert pp_step_stream.is_live()
    with torch.cuda.stream(torch.cuda.Stream()):  # behind vLLM's back
        assert not pp_step_stream.is_live()


def test_nothing_is_settled_before_it_is_installed(upstream, cuda):
    upstream("vllm.utils.torch_utils", _current_stream_tls=threading.local())
    assert not pp_step_stream.is_live()
