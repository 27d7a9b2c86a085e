"""Orphan KV tensors, with upstream's own classes and allocator."""

import copy
import inspect
import itertools
import textwrap
from contextlib import nullcontext
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from types import SimpleNamespace

import pytest

from ple_inference.vllm_plugin.override import OverrideError
from ple_inference.vllm_plugin.overrides.pp_orphan_kv import without_orphans

INTERFACE = "vllm.v1.kv_cache_interface"
PLE = "model.layers.1.ple"
"""The layer that the first stage owns; the second stage's plan still has its tensor."""


@pytest.fixture
def interface(upstream):
    return upstream(
        INTERFACE,
        "KVCacheTensor",
        "KVCacheGroupRole",
        "KVCacheGroupSpec",
        "KVCacheConfig",
        dataclass=dataclass,
        field=field,
        Enum=Enum,
        cached_property=cached_property,
    )


@pytest.fixture
def plan(interface):
    """A later stage's plan: an empty group that keeps its spec, and the tensor planned from it."""

    def tensor(offset: int, *layers: str):
        return interface.KVCacheTensor(
            size=4096, layers=list(layers), layer_stride=64, block_stride=64, offset=offset
        )

    def group(*layers: str):
        return interface.KVCacheGroupSpec(list(layers), SimpleNamespace(has_layer_views=False))

    return interface.KVCacheConfig(
        num_blocks=3,
        kv_cache_tensors=[tensor(0, "layers.4", "layers.5"), tensor(128, PLE), tensor(192, "layers.6")],
        kv_cache_groups=[group("layers.4", "layers.5"), group(), group("layers.6")],
    )


@pytest.fixture
def allocate(upstream, interface):
    """Upstream's allocate_kv_cache on a host buffer."""
    module = upstream(
        "vllm.v1.worker.utils",
        "allocate_kv_cache",
        current_platform=SimpleNamespace(is_rocm=lambda: False),
        torch=SimpleNamespace(zeros=lambda size, dtype, device: bytearray(size), int8=None),
        UniformTypeKVCacheSpecs=type("UniformTypeKVCacheSpecs", (), {}),
    )
    return lambda config: module.allocate_kv_cache(config, "cpu", None)


def test_upstream_alone_dies_on_the_orphan(allocate, plan):
    """What the override is for: when this fails, it can go."""
    with pytest.raises(StopIteration):
        allocate(plan)


def test_the_rest_is_allocated_where_it_was_planned(allocate, plan):
    before = copy.deepcopy(plan)
    config = without_orphans(plan)
    assert set(allocate(config)) == {"layers.4", "layers.5", "layers.6"}
    assert [tensor.offset for tensor in config.kv_cache_tensors] == [0, 192]
    assert config.kv_cache_groups == before.kv_cache_groups
    assert config.num_blocks == before.num_blocks
    assert plan == before


def test_a_plan_without_orphans_is_unchanged(plan):
    config = without_orphans(plan)
    assert without_orphans(config) == config


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_each_stage_keeps_exactly_its_layers(interface, stages):
    """Uneven partitions of eight layers; upstream plans every group for every rank."""
    layers = [f"layers.{i}" for i in range(8)] + [PLE]
    for cuts in itertools.combinations(range(1, 8), stages - 1):
        bounds = [0, *cuts, 8]
        for start, end in itertools.pairwise(bounds):
            local = {f"layers.{i}" for i in range(start, end)} | ({PLE} if start <= 1 < end else set())
            config = interface.KVCacheConfig(
                num_blocks=1,
                kv_cache_tensors=[interface.KVCacheTensor(1, [name], 1, 1, 0) for name in layers],
                kv_cache_groups=[
                    interface.KVCacheGroupSpec([name] if name in local else [], None) for name in layers
                ],
            )
            kept = {name for tensor in without_orphans(config).kv_cache_tensors for name in tensor.layers}
            assert kept == local


def test_a_tensor_of_two_ranks_is_refused(plan):
    plan.kv_cache_groups[0].layer_names.remove("layers.5")
    with pytest.raises(OverrideError, match=r"KV tensor of layers\.4 also holds layers\.5"):
        without_orphans(plan)


@pytest.fixture
def runner_class(upstream, interface, fresh_plugin):
    class GPUModelRunner:
        def initialize_kv_cache(self, kv_cache_config, is_profiling=False, kv_cache_allocation_context=None):
            self.got = (kv_cache_config, is_profiling, kv_cache_allocation_context)

    upstream("vllm.v1.worker.gpu.model_runner", GPUModelRunner=GPUModelRunner)
    from ple_inference.vllm_plugin.runner import TriplexModelRunner

    return TriplexModelRunner


def test_the_runner_filters_once_installed(runner_class, plan):
    from ple_inference.vllm_plugin.overrides import pp_orphan_kv

    runner, context = runner_class(), nullcontext()
    assert not pp_orphan_kv.is_live()
    runner.initialize_kv_cache(plan, is_profiling=True)
    assert runner.got == (plan, True, None)
    pp_orphan_kv.install()
    assert pp_orphan_kv.is_live()
    runner.initialize_kv_cache(plan, kv_cache_allocation_context=context)
    assert runner.got == (without_orphans(plan), False, context)


def test_the_runners_signature_is_upstreams(runner_class, vllm_source):
    namespace: dict[str, object] = {}
    text = vllm_source.text("vllm.v1.worker.gpu.model_runner:GPUModelRunner.initialize_kv_cache")
    exec(f"from __future__ import annotations\n{textwrap.dedent(text)}", namespace)
    theirs = inspect.signature(namespace["initialize_kv_cache"])
    ours = inspect.signature(runner_class.initialize_kv_cache)
    assert [(p.name, p.kind, p.default) for p in ours.parameters.values()] == [
        (p.name, p.kind, p.default) for p in theirs.parameters.values()
    ]
