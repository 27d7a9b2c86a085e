"""What a step asks the daemon for, with upstream's own model state and n-gram embedding on the CPU.

Stand-ins play the base classes that need a GPU or a whole engine; the text of Qwen4ExpModelState and of
Qwen4ExpNGramEmbedding is the wheel's.
"""

import json
import threading
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "ngram_ids.json").read_text())
SPEC = GOLDEN["specs"]["real"]
EOS = 248_044
HEADS = 16
Q4 = "vllm.models.qwen4_exp"


class MambaHybridModelState:
    """What the real one leaves behind, and journals of what it is told."""

    def __init__(self, vllm_config: Any, model: Any, encoder_cache: Any, device: Any) -> None:
        self.vllm_config, self.model, self.device = vllm_config, model, device
        self.model_config = vllm_config.model_config
        self.max_num_reqs, self.max_num_tokens = 4, 64
        self.told: list[tuple] = []

    def add_request(self, req_index: int, data: Any) -> None:
        self.told.append(("add", req_index, data.req_id))

    def remove_request(self, req_id: str) -> None:
        self.told.append(("remove", req_id))

    def prepare_inputs(self, input_batch: Any, req_states: Any) -> dict[str, Any]:
        return {"base": True}

    def prepare_dummy_inputs(self, num_reqs: int, num_tokens: int) -> dict[str, Any]:
        return {"base": True}


class PinnedHostEmbedding(nn.Module):
    """Of upstream's, what ours builds on."""

    def __init__(
        self, elements: int, dtype: torch.dtype, *, max_total_tokens: int, num_ngram_heads: int
    ) -> None:
        super().__init__()
        del max_total_tokens, num_ngram_heads
        self.embedding_dim = elements
        self.embedding_method = SimpleNamespace(lookup_dtype=lambda _: dtype)
        self._uva_weight = torch.zeros(1)


class Link:
    """Stands for the connection: hints are kept, and rows are their ids' numbers."""

    def __init__(self, options: Any, ngram: Any, max_tokens: int) -> None:
        self.options, self.ngram, self.max_tokens = options, ngram, max_tokens
        self.client = self.rows = self
        self.hints: list[tuple] = []
        self.asked: list[torch.Tensor] = []
        self.is_closed = False

    def prefetch(self, request_id, tokens, context, epoch) -> None:
        self.hints.append(("prefetch", request_id, list(tokens), list(context), epoch))

    def cancel_prefetch(self, request_id, epoch) -> None:
        self.hints.append(("cancel", request_id, epoch))

    def deliver(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        self.asked.append(ids.clone())
        rows.view(torch.int64)[:, :HEADS] = ids

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def plugin(upstream, fresh_plugin, cuda, monkeypatch):
    """Our modules, importable against the stand-ins."""
    for name, contents in (
        ("vllm.config", {"VllmConfig": object}),
        ("vllm.v1.core.sched.output", {"NewRequestData": object}),
        ("vllm.v1.worker.gpu.input_batch", {"InputBatch": object}),
        ("vllm.v1.worker.gpu.mm.encoder_cache", {"EncoderCache": object}),
        ("vllm.v1.worker.gpu.states", {"RequestState": object}),
        ("vllm.v1.worker.gpu.model_states.mamba_hybrid", {"MambaHybridModelState": MambaHybridModelState}),
        ("vllm.utils.gpu_sync_debug", {"gpu_sync_allowed": None}),
        (f"{Q4}.common.ngram_embedding", {"Qwen4ExpPLEPinnedHostEmbedding": PinnedHostEmbedding}),
        (f"{Q4}.nvidia.ple_layer", {}),
    ):
        upstream(name, **contents)
    registry: dict[str, type] = {}
    upstream(
        "vllm.model_executor.custom_op", "PluggableLayer",
        nn=nn, op_registry_oot=registry, op_registry={}, logger=SimpleNamespace(debug=lambda *_: None),
    )  # fmt: skip
    upstream(
        f"{Q4}.nvidia.ngram_embedding", "Qwen4ExpNGramEmbedding",
        torch=torch, nn=nn, AutoWeightsLoader=Loader, Qwen4ExpPLENvFp4EmbeddingMethod=type("NvFp4", (), {}),
    )  # fmt: skip
    upstream(
        f"{Q4}.nvidia.model_state", "Qwen4ExpModelState",
        torch=torch, nn=nn, MambaHybridModelState=MambaHybridModelState,
    )  # fmt: skip
    from ple_inference.vllm_plugin import daemon_embedding, model_state

    monkeypatch.setattr(model_state, "TableLink", Link)
    return SimpleNamespace(embedding=daemon_embedding, state=model_state)


class Loader:
    """Takes what the embedding hands on."""

    def __init__(self, module: nn.Module) -> None: ...

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return {name for name, _ in weights}


def make_ngram(plugin: Any, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Our n-gram embedding with the released constants; upstream's constructor needs a whole engine."""
    ngram = plugin.embedding.DaemonNGramEmbedding.__new__(plugin.embedding.DaemonNGramEmbedding)
    nn.Module.__init__(ngram)
    constants = SPEC["constants"]
    ngram.ngram_size, ngram.heads_per_ngram, ngram.ngram_heads = 3, 8, HEADS
    ngram.eos_token_id, ngram.split_ngram_parts = EOS, 128
    ngram.layer_multipliers = torch.tensor(constants["multipliers"])
    ngram.ngram_heads_vocab_sizes = torch.tensor(constants["primes"])
    ngram.ngram_heads_offsets = torch.tensor(constants["offsets"])
    ngram._prefetch_ids = torch.full((64, HEADS), -1)
    ngram.ngram_embedding = plugin.embedding.DaemonPLEEmbedding(
        160, dtype, max_total_tokens=64, num_ngram_heads=HEADS
    )
    ngram.ngram_embedding.org_vocab_size = 2000
    return ngram


def make_state(plugin: Any, *modules: nn.Module, pp: int = 2, **triplex: Any) -> Any:
    text = SimpleNamespace(ple_layer_ids=[2], ngram_size=3, eos_token_id=EOS)
    config = SimpleNamespace(
        model_config=SimpleNamespace(hf_text_config=text),
        parallel_config=SimpleNamespace(pipeline_parallel_size=pp),
        additional_config={"triplex": {"table": "unix:/t.sock"} | triplex},
    )
    model = nn.ModuleList(modules)
    return plugin.state.TriplexModelState(config, model, None, torch.device("cpu"))


def make_batch(requests: dict[str, tuple[list[int], int, int]]) -> tuple[Any, Any]:
    """name -> (all tokens, computed, scheduled now), as vLLM's batch and request states; slots in reverse."""
    slots = {name: len(requests) - 1 - place for place, name in enumerate(requests)}
    tokens = torch.zeros(len(requests), 256, dtype=torch.int32)
    computed = torch.zeros(len(requests), dtype=torch.int32)
    step: list[int] = []
    starts = [0]
    for name, (every, done, now) in requests.items():
        tokens[slots[name], : len(every)] = torch.tensor(every)
        computed[slots[name]] = done
        step += every[done : done + now]
        starts.append(len(step))
    padding = [17] * 3
    batch = SimpleNamespace(
        req_ids=list(requests), num_reqs=len(requests), num_reqs_after_padding=len(requests),
        num_tokens=len(step), input_ids=torch.tensor(step + padding, dtype=torch.int32),
        idx_mapping=torch.tensor([slots[name] for name in requests]),
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
    )  # fmt: skip
    states = SimpleNamespace(
        req_id_to_index=slots,
        num_computed_tokens=SimpleNamespace(gpu=computed), all_token_ids=SimpleNamespace(gpu=tokens),
    )  # fmt: skip
    return batch, states


def rows_of(tokens: list[int]) -> list[list[int]]:
    """Row ids of a sequence from its start, by the scalar rule."""
    padded = [EOS, EOS, *tokens]
    multipliers = SPEC["constants"]["multipliers"]
    rows = []
    for place in range(2, len(padded)):
        window = [padded[place], padded[place - 1], padded[place - 2]]
        if window[1] == EOS:
            window[2] = EOS
        terms = [(token * factor) for token, factor in zip(window, multipliers, strict=True)]
        mixed = [terms[0] ^ terms[1], terms[0] ^ terms[1] ^ terms[2]]
        signed = [(value + 2**63) % 2**64 - 2**63 for value in mixed]
        sizes, offsets = SPEC["constants"]["primes"], SPEC["constants"]["offsets"]
        rows.append([signed[head // 8] % sizes[head] + offsets[head] for head in range(HEADS)])
    return rows


def test_the_scalar_rule_gives_the_golden_rows() -> None:
    for case in GOLDEN["cases"]:
        if case["spec"] == "real" and case["context"] == [EOS, EOS]:
            assert rows_of(case["tokens"]) == case["rows"], case["name"]


def test_upstream_alone_refuses_stages(plugin) -> None:
    import sys

    upstreams = sys.modules[f"{Q4}.nvidia.model_state"].Qwen4ExpModelState
    config = make_state(plugin, make_ngram(plugin)).vllm_config
    with pytest.raises(RuntimeError, match="pipeline_parallel_size=1"):
        upstreams(config, nn.ModuleList(), None, torch.device("cpu"))


def test_a_mixed_step_asks_for_each_tokens_rows(plugin) -> None:
    ngram = make_ngram(plugin)
    state = make_state(plugin, nn.Linear(1, 1), ngram)
    chat = [1000 + 7 * place for place in range(40)]
    with_eos = [5, EOS, 6, 7, EOS, EOS, 8, 9]
    requests = {
        "first chunk": (chat, 0, 9),
        "later chunk": (chat, 11, 20),
        "decode": (with_eos, 7, 1),
        "decode with drafts": (with_eos, 2, 4),
    }
    batch, states = make_batch(requests)
    inputs = state.prepare_inputs(batch, states)
    assert set(inputs) == {"base", "query_start_loc", "ngram_context"}
    expected = [row for every, done, now in requests.values() for row in rows_of(every)[done : done + now]]
    (asked,) = state._link.asked
    assert asked.tolist() == expected
    # They lie where the forward, and so a graph, reads them; rows of padding are left as they were.
    read = ngram.ngram_embedding.finalize_prefetch(len(expected) + 3)
    assert read.data_ptr() == ngram.ngram_embedding.row_bytes.data_ptr()
    assert read.shape == (len(expected) + 3, HEADS * 160)
    numbers = read.view(torch.uint8).view(torch.int64)
    assert numbers[: len(expected), :HEADS].tolist() == expected
    assert (numbers[len(expected) :] == 0).all()


def test_a_stage_without_the_layer_does_none_of_it(plugin) -> None:
    state = make_state(plugin, nn.Linear(1, 1))
    batch, states = make_batch({"a": ([1, 2, 3], 0, 3)})
    assert state.prepare_inputs(batch, states) == {"base": True}
    assert state.prepare_dummy_inputs(1, 4) == {"base": True}
    state.add_request(0, new_request("a", [1, 2, 3]))
    state.remove_request("a")
    assert state.told == [("add", 0, "a"), ("remove", "a")]
    state.close()


def new_request(name: str, tokens: list[int], computed: int = 0) -> Any:
    return SimpleNamespace(req_id=name, prefill_token_ids=tokens, num_computed_tokens=computed)


def test_dummy_and_warm_up_steps_touch_no_daemon(plugin) -> None:
    state = make_state(plugin, make_ngram(plugin))
    batch, states = make_batch({"req_0_made_up": ([1, 2, 3], 0, 3)})
    real = dict(states.req_id_to_index)
    states.req_id_to_index = {}
    state.prepare_inputs(batch, states)
    states.req_id_to_index = real
    with state.without_lookups():
        state.add_request(0, new_request("_warmup_", [1, 2, 3]))
        state.prepare_inputs(batch, states)
        state.remove_request("_warmup_")
    assert state._link.asked == []
    assert state._link.hints == []
    state.prepare_inputs(batch, states)
    assert len(state._link.asked) == 1


def test_requests_are_hinted_and_taken_back(plugin) -> None:
    state = make_state(plugin, make_ngram(plugin))
    state.add_request(0, new_request("a", [1, 2, 3, 4, 5], computed=3))
    state.remove_request("a")
    state.remove_request("a")
    state.add_request(1, new_request("a", [1, 2, 3, 4, 5, 6], computed=0))
    first, cancel, again = state._link.hints
    assert first[:4] == ("prefetch", "a", [4, 5], [2, 3])
    assert cancel == ("cancel", "a", first[4])
    assert again[:4] == ("prefetch", "a", [1, 2, 3, 4, 5, 6], [])
    assert again[4] > first[4]
    assert [told[0] for told in state.told] == ["add", "remove", "remove", "add"]


def test_the_worker_is_told_where_the_table_is(plugin) -> None:
    state = make_state(plugin, make_ngram(plugin), lookup_deadline_s=5)
    assert (state._link.options.table, state._link.options.lookup_deadline_s) == ("unix:/t.sock", 5)
    assert state._link.max_tokens == 64
    state.close()
    assert state._link.is_closed


def test_two_layers_on_one_stage_are_refused(plugin) -> None:
    with pytest.raises(ValueError, match="2 PLE layers on one rank"):
        make_state(plugin, make_ngram(plugin), make_ngram(plugin))


def test_the_table_is_passed_over_when_weights_load(plugin) -> None:
    ngram = make_ngram(plugin)
    constants = {
        name: getattr(ngram, name).clone()
        for name in ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")
    }
    ngram.layer_multipliers.zero_()

    def weights():
        for part in range(3):
            yield f"ngram_embedding.shard_{part}.weight", None  # would fail if anybody looked at it
        yield "ngram_embedding.weight", None
        yield "ngram_embedding.weight_scale", torch.ones(1)
        yield from constants.items()

    loaded = ngram.load_weights(weights())
    assert loaded == {"ngram_embedding.weight", "ngram_embedding.weight_scale", *constants}
    assert torch.equal(ngram.layer_multipliers, constants["layer_multipliers"])


def test_what_reads_rows_waits_for_those_of_its_own_step(plugin) -> None:
    embedding = make_ngram(plugin).ngram_embedding
    current, beside = torch.cuda.current_stream(), torch.cuda.Stream()
    may_come, seen = [threading.Event(), threading.Event()], []
    for step, gate in enumerate(may_come, start=1):
        beside.submit(lambda gate=gate: gate.wait(30))
        beside.submit(lambda step=step: embedding.row_bytes.fill_(step))
        embedding.rows_there.record(beside)
        embedding.finalize_prefetch(1)
        current.submit(lambda: seen.append(int(embedding.row_bytes[0, 0])))
        assert len(seen) == step - 1
        gate.set()
        current.synchronize()
    assert seen == [1, 2]


def test_there_is_something_to_wait_for_when_graphs_are_captured(plugin) -> None:
    """PyTorch makes an event when it is first recorded; a wait for one that is not made is left out."""
    assert make_ngram(plugin).ngram_embedding.rows_there.is_made


def test_fp8_rows_are_half_as_wide(plugin) -> None:
    embedding = make_ngram(plugin, torch.float8_e4m3fn).ngram_embedding
    assert embedding.row_bytes.shape == (64, HEADS * 160)
    assert embedding.finalize_prefetch(5).dtype == torch.float8_e4m3fn


def test_the_embedding_is_live_once_installed(plugin, upstream) -> None:
    layers = upstream(f"{Q4}.nvidia.ple_layer", Qwen4ExpNGramEmbedding=object)
    assert not plugin.embedding.is_live()
    plugin.embedding.install()
    plugin.embedding.install()
    assert plugin.embedding.is_live()
    assert layers.Qwen4ExpNGramEmbedding is plugin.embedding.DaemonNGramEmbedding
    layers.Qwen4ExpNGramEmbedding = object
    assert not plugin.embedding.is_live()
