"""Experts repacked in their own memory are those that vLLM's own code makes, to the bit."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

INT_WNA16 = "vllm.model_executor.layers.fused_moe.oracle.int_wna16"
MARLIN = "vllm.model_executor.layers.quantization.utils.marlin_utils"
EXPERTS, HIDDEN, WIDTH, GROUP, FACTOR = 3, 256, 128, 128, 8


def compiled_repack(
    weight: torch.Tensor, columns: int, rows: int, bits: int, eight_bit: bool
) -> torch.Tensor:
    """In place of CUDA's: all values elsewhere, each at a place by shape, [columns / 16, rows * bits / 2]."""
    assert weight.shape == (columns * bits // 32, rows)
    assert weight.is_contiguous()
    order = torch.randperm(weight.numel(), generator=torch.Generator().manual_seed(columns))
    return weight.flatten()[order].view(columns // 16, rows * (bits // 2))


def round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


@pytest.fixture
def marlin(upstream: Callable[..., Any], fresh_plugin: None) -> Any:
    """vLLM's own text of all that is involved but the compiled function, and our module over it."""
    ops = upstream("vllm._custom_ops", "gptq_marlin_moe_repack", torch=_Torch())
    log = SimpleNamespace(warning_once=lambda *_: None)
    numbers = {"torch": torch, "math": math, "numpy": np, "logger": log, "round_up": round_up}
    scales = ("get_scale_perms", "marlin_permute_scales", "marlin_moe_permute_scales")
    utils = upstream(MARLIN, *scales, "marlin_moe_padded_intermediate", **numbers)
    module = upstream(
        INT_WNA16,
        "_process_weights_marlin",
        torch=torch,
        ops=ops,
        marlin_moe_permute_scales=utils.marlin_moe_permute_scales,
        marlin_moe_padded_intermediate=utils.marlin_moe_padded_intermediate,
    )
    sys.modules.pop("ple_inference.vllm_plugin.expert_repack", None)
    ours = importlib.import_module("ple_inference.vllm_plugin.expert_repack")
    yield SimpleNamespace(module=module, ours=ours)
    sys.modules.pop("ple_inference.vllm_plugin.expert_repack", None)


class _Torch:
    """torch with the compiled function that its CPU build lacks."""

    ops = SimpleNamespace(_C=SimpleNamespace(gptq_marlin_repack=compiled_repack))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def layer_weights(width: int = WIDTH) -> tuple[torch.Tensor, ...]:
    random = torch.Generator().manual_seed(7)

    def words(rows: int, columns: int) -> torch.Tensor:
        shape = (EXPERTS, rows, columns // FACTOR)
        return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, generator=random)

    def scales(rows: int, columns: int) -> torch.Tensor:
        return torch.rand(EXPERTS, rows, columns // GROUP, generator=random).to(torch.bfloat16)

    return (
        words(2 * width, HIDDEN),
        words(HIDDEN, width),
        scales(2 * width, HIDDEN),
        scales(HIDDEN, width),
    )


def process(marlin: Any, weights: tuple[torch.Tensor, ...], *others: Any) -> tuple[Any, ...]:
    layer = SimpleNamespace(intermediate_size_per_partition=WIDTH, num_groups_w13=2, num_groups_w2=1)
    return marlin.module._process_weights_marlin(layer, None, 4, FACTOR, GROUP, *weights, *others)


def test_equal_to_upstream_and_in_the_same_memory(marlin: Any) -> None:
    expected = process(marlin, layer_weights())
    assert not marlin.ours.is_live()
    marlin.ours.install()
    marlin.ours.install()
    assert marlin.ours.is_live()
    weights = layer_weights()
    found = process(marlin, weights)
    assert len(found) == len(expected)
    for ours, theirs, given in zip(found[:4], expected[:4], weights, strict=True):
        assert torch.equal(ours, theirs)
        assert ours.dtype == theirs.dtype
        assert ours.data_ptr() == given.data_ptr()
    assert found[4:] == expected[4:] == (None,) * 6


def test_what_it_was_not_made_for_is_upstreams(marlin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    marlin.ours.install()
    weights = layer_weights()
    process_of = marlin.module._process_weights_marlin
    upstream_calls: list[int] = []
    wrapped = marlin.ours._in_place(lambda *arguments: upstream_calls.append(len(arguments)) or ())
    layer = SimpleNamespace(intermediate_size_per_partition=WIDTH)
    zeros = torch.zeros(EXPERTS, 2 * WIDTH // FACTOR, 2, dtype=torch.int32)
    assert wrapped(layer, None, 4, FACTOR, GROUP, *weights, zeros) == ()
    assert wrapped(layer, torch.int8, 4, FACTOR, GROUP, *weights) == ()
    assert wrapped(layer, None, 4, FACTOR, -1, *weights) == ()
    narrow = SimpleNamespace(intermediate_size_per_partition=WIDTH - 32)
    assert wrapped(narrow, None, 4, FACTOR, GROUP, *weights) == ()
    assert upstream_calls == [10, 9, 9, 9]
    assert process_of.upstream is not None
