"""What a rank is predicted to hold and to read, held against published figures of the released shapes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import pytest
import released_layout

from ple_inference.vllm_engine.bytes_per_token import bytes_per_token
from ple_inference.vllm_engine.linear_shapes import LinearShapes
from ple_inference.vllm_engine.pipeline import Pipeline
from ple_inference.vllm_engine.rank_memory import LoadOptions, RankMemory, rank_memories
from ple_inference.vllm_engine.rank_modules import Method, Module, rank_modules
from ple_inference.vllm_engine.tensors import Tensor, Tensors

GIB, MIB = 2**30, 2**20
THREE = Pipeline((16, 16, 16), ple_layer=1)
# As the article's production configuration: 512 tokens a step, four sequences.
OPTIONS = LoadOptions(512, 4)


@cache
def tensors(form: str, layers: int = 48) -> Tensors:
    """Headers of the released shapes, in no file. One expert of a layer is as large as all 512."""
    found = Tensors()
    for name, (dtype, shape) in released_layout.tensors(form, layers, experts=1).items():
        of_experts = ".mlp.experts" in name or ".mlp.gate." in name
        rows = shape[0] * (released_layout.EXPERTS if of_experts else 1)
        size_bytes = rows * prod(shape[1:]) * released_layout.ITEM_BYTES[dtype]
        found[name] = Tensor(Path("model.safetensors"), dtype, (rows, *shape[1:]), 0, size_bytes)
    return found


def text(form: str, layers: int = 48) -> dict[str, Any]:
    return released_layout.config(form, layers)["text_config"]


def modules(form: str, pipeline: Pipeline, layers: int = 48, *, placed: bool = True) -> list[list[Module]]:
    return rank_modules(tensors(form, layers), LinearShapes(text(form, layers)), pipeline, placed=placed)


@pytest.fixture(scope="module")
def placed() -> list[list[Module]]:
    return modules("int4-mixed", THREE)


def held_while_loading_gib(rank: RankMemory) -> float:
    """Without vision, which the article's figures lack, and without what is no part of loading the model."""
    others = ("vision", "cuBLAS", "sampler", "received activations")
    return sum(size for part, size in rank.parts.items() if part not in others) / GIB


def without_padding_gib(ranks: list[list[Module]]) -> list[float]:
    """What our own 12 rows of padding of each injection add, in a rank."""
    return [
        sum(module.size_bytes * 12 // 16 for module in rank if module.name.endswith("block_inject_weight"))
        / GIB
        for rank in ranks
    ]


def test_the_article_on_three_ranks(placed: list[list[Module]]) -> None:
    """Its 21.58, 21.55, 21.55 GiB with both vocabularies everywhere; 20.98 of 20.98, 20.44, 21.05 without."""
    padding = without_padding_gib(placed)
    everywhere = modules("int4-mixed", THREE, placed=False)
    before = [held_while_loading_gib(rank) for rank in rank_memories(everywhere, text("int4-mixed"), OPTIONS)]
    assert [round(rank - pad, 2) for rank, pad in zip(before, padding, strict=True)] == [21.58, 21.55, 21.55]
    after = [held_while_loading_gib(rank) for rank in rank_memories(placed, text("int4-mixed"), OPTIONS)]
    assert [round(rank - pad, 2) for rank, pad in zip(after, padding, strict=True)] == [20.98, 20.34, 20.95]


def test_bytes_of_a_decoded_token(placed: list[list[Module]]) -> None:
    reads = bytes_per_token(placed, text("int4-mixed"), kv_bytes=2, context=262_144)
    assert reads.weights["routed experts"] == pytest.approx(62_286e6 * 10 / 512, rel=1e-3)
    assert reads.weights["embed_tokens"] == 2560 + 20 * 2  # bytes of a row and its scales
    assert reads.weights["vision"] == 0
    assert reads.weights_bytes / 1e9 == pytest.approx(5.024, abs=1e-3)
    # 36 states and the n-gram layer's, read and written; 2,048 tokens of 2 KiB in 12 layers.
    assert reads.states == 2 * (36 * 3_207_168 + 10_240 * 9 * 2)
    assert reads.selected_kv == 48 * MIB
    assert reads.pooled_keys == 12 * 65_536 * 128 * 2
    assert reads.tokens_per_s(936e9) == pytest.approx(936e9 / (reads.weights_bytes + reads.states))


def test_what_each_rank_holds(placed: list[list[Module]]) -> None:
    parts = [rank.parts for rank in rank_memories(placed, text("int4-mixed"), OPTIONS)]
    assert [rank["embed_tokens"] > 0 for rank in parts] == [True, False, False]
    assert [rank["vision"] for rank in parts] == [448_931_056 * 2, 0, 0]
    assert [rank["PLE"] > 0 for rank in parts] == [True, False, False]
    assert [rank["lm_head"] > 0 for rank in parts] == [False, False, True]
    assert parts[0]["lm_head"] == 0
    mixers = [module.name for rank in placed for module in rank if "hyper_connection_mixer" in module.name]
    assert all(name in {module.name for module in placed[2]} for name in mixers)
    assert len(mixers) == 3


@pytest.mark.parametrize(("form", "published"), [("bf16", "BF16_BYTES"), ("fp8", "FP8_BYTES")])
def test_nothing_is_lost_of_a_published_checkpoint(form: str, published: str) -> None:
    """All bytes are somewhere: what differs is known."""
    stored = tensors(form)
    assert sum(tensor.size_bytes for tensor in stored.values()) == getattr(released_layout, published)
    left_out = sum(
        tensor.size_bytes
        for name, tensor in stored.items()
        if name.startswith("mtp.") or ".ngram_embedding." in name
    )
    ranks = modules(form, THREE)
    loaded = sum(module.size_bytes for rank in ranks for module in rank)
    pads = 96 * 12 * 10_240 * 2  # rows below each merged down projection and injection
    a_logs = 36 * 48 * 2  # f32 where the checkpoint has bf16
    scales = sum(
        tensor.size_bytes
        for name, tensor in stored.items()
        if name.endswith("_inv") and not name.startswith("mtp.")
    )
    assert loaded == getattr(released_layout, published) - left_out + pads + a_logs + scales


def test_how_modules_are_repacked(placed: list[list[Module]]) -> None:
    methods = {module.name: module.method for rank in placed for module in rank}
    assert methods["embed_tokens"] is Method.PLAIN
    assert methods["lm_head"] is Method.MARLIN
    assert methods["layers.0.linear_attn.in_proj_qkvz"] is Method.HUMMING
    assert methods["layers.0.linear_attn.in_proj_ba"] is Method.PLAIN
    assert methods["layers.3.self_attn.qkv_proj"] is Method.HUMMING
    assert methods["layers.3.self_attn.indexer.index_qk_proj"] is Method.MARLIN
    assert methods["layers.5.mlp.experts"] is Method.MARLIN_EXPERTS
    assert methods["layers.1.ple.kv_proj"] is Method.MARLIN
    plain = {module.name: module.method for module in modules("bf16", Pipeline((4,), 1), 4)[0]}
    assert set(plain.values()) == {Method.PLAIN}
    assert "layers.3.self_attn.indexer.index_qk_proj" not in plain  # one product with q, k and v


def test_the_most_that_a_load_takes() -> None:
    """A layer's experts three times with upstream's repack; and a smaller GPU gives back what lies idle."""
    pipeline = Pipeline((4,), 1)
    ranks, config = modules("int4-mixed", pipeline, 4), text("int4-mixed", 4)
    (once,) = rank_memories(ranks, config, OPTIONS)
    thrice = replace(OPTIONS, experts_in_place=False)
    (rank,) = rank_memories(ranks, config, thrice)
    (experts,) = [module for module in ranks[0] if module.name == "layers.3.mlp.experts"]
    # The sampler's buffers come after the last repack.
    top = rank.allocated_bytes + 2 * experts.size_bytes
    assert 0.99 * top < rank.peak_allocated_bytes < top
    assert rank.allocated_bytes <= rank.reserved_bytes < rank.peak_reserved_bytes
    assert rank.held_bytes <= rank.allocated_bytes < 1.02 * rank.held_bytes
    # With expert_repack it is the output head, whose linear kernel makes two copies.
    head = next(module.size_bytes for module in ranks[0] if module.name == "lm_head")
    assert once.peak_allocated_bytes < once.allocated_bytes + 2.01 * head < rank.peak_allocated_bytes
    assert once.held_bytes == rank.held_bytes
    tight = replace(thrice, capacity_bytes=rank.peak_allocated_bytes + 300 * MIB)
    (less,) = rank_memories(ranks, config, tight)
    assert less.peak_reserved_bytes <= rank.peak_allocated_bytes + 300 * MIB < rank.peak_reserved_bytes
    assert less.held_bytes == rank.held_bytes


def test_buffers_grow_with_the_step() -> None:
    ranks, config = modules("int4-mixed", Pipeline((2, 2), 1), 4), text("int4-mixed", 4)
    small = rank_memories(ranks, config, LoadOptions(512, 4))
    large = rank_memories(ranks, config, LoadOptions(1024, 8))
    assert [rank.weights_bytes for rank in small] == [rank.weights_bytes for rank in large]
    grown = [
        {part: after.parts[part] - before.parts[part] for part in after.parts}
        for before, after in zip(small, large, strict=True)
    ]
    assert grown[0]["PLE rows and ids"] == 512 * (2560 * 2 + 16 * 8)
    assert grown[1]["QSA selections"] == 512 * 2052 * 4
    assert grown[1]["received activations"] == 512 * 10_240 * 2
    assert grown[1]["sampler"] == 4 * (248_320 * 4 + 2 * 7760 * 4)
    assert grown[1]["rotary cache"] == 0
    assert large[1].parts["rotary cache"] == 262_144 * 64 * 2
