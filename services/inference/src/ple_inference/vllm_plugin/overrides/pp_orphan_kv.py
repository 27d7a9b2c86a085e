"""Allocate no KV tensor for layers that this pipeline stage does not have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ple_inference.vllm_plugin.override import WORKER, Override, OverrideError, Upstream


def install() -> None:
    from ple_inference.vllm_plugin.runner import TriplexModelRunner

    TriplexModelRunner.skips_orphan_kv = True


def is_live() -> bool:
    from ple_inference.vllm_plugin.runner import TriplexModelRunner

    return TriplexModelRunner.skips_orphan_kv


def without_orphans(kv_cache_config: Any) -> Any:
    """A copy of a KVCacheConfig without the tensors whose layers are in no group of this rank.

    Offsets and sizes are absolute, so that the tensors that stay keep their place. Raises OverrideError for a
    tensor of which only some layers are here: upstream lays out no such tensor.
    """
    local = {name for group in kv_cache_config.kv_cache_groups for name in group.layer_names}
    kept = [tensor for tensor in kv_cache_config.kv_cache_tensors if not local.isdisjoint(tensor.layers)]
    for tensor in kept:
        if strangers := [name for name in tensor.layers if name not in local]:
            raise OverrideError(
                f"triplex: pp_orphan_kv: the KV tensor of {tensor.layers[0]} also holds {strangers[0]} of "
                "another rank: this layer partition cannot be served, change VLLM_PP_LAYER_PARTITION"
            )
    return replace(kv_cache_config, kv_cache_tensors=kept)


OVERRIDE = Override(
    name="pp_orphan_kv",
    summary="no KV tensor for layers of other pipeline stages",
    why="A KV group without a layer on this rank keeps the spec of the whole model, from which vLLM plans a "
    "tensor that belongs to no group of the rank: with one PLE layer, every stage but its owner has one.",
    without_it="pipeline_parallel_size > 1 ends with StopIteration in allocate_kv_cache on every rank "
    "without the PLE layer.",
    remove_when="_project_kv_cache_groups_to_worker narrows the spec of a group that has no local layer, or "
    "allocate_kv_cache skips tensors of no local group.",
    install=f"{__name__}:install",
    is_live=f"{__name__}:is_live",
    places=WORKER,
    upstream=(
        Upstream(
            "vllm.v1.worker.gpu.model_runner:GPUModelRunner.initialize_kv_cache",
            "2ab20e1120895ab83934af7050f4d5dffab9e726d96c3935001889cb2861b822",
            role="replaces",
        ),
        Upstream(
            "vllm.v1.worker.gpu_worker:Worker._make_model_runner",
            "2bda2a14b4c248122a47a205d32a9cda5b5c09aa1b977ce05dca01b200458ce6",
        ),
        Upstream(
            "vllm.v1.worker.utils:allocate_kv_cache",
            "21848da388478d6d8e595254103e03ea52fd6525258e29a3f34c9932099093ab",
        ),
        Upstream(
            "vllm.v1.kv_cache_interface:KVCacheConfig",
            "733f2a1fad52162dc2895f10460f72fb80671aec4015cfe4faf6a51616d63717",
        ),
        Upstream(
            "vllm.v1.kv_cache_interface:KVCacheTensor",
            "05732e7b1896ee462b671d4bfe5c90324a40969f074b0f2a50dd98389254ac16",
        ),
        Upstream(
            "vllm.v1.kv_cache_interface:KVCacheGroupSpec",
            "2ba677a94ff32c19e8e34cb01bfd6e3ccd07e87d74209d0eaccc3d42299ab123",
        ),
        Upstream(
            "vllm.v1.core.kv_cache_planning:get_kv_cache_config_from_groups",
            "596d87668864494e45f9cc9af08e3db9fd2c212382dffbbcb2fe7bf8ccfab0c6",
        ),
        Upstream(
            "vllm.v1.core.kv_cache_planning:_project_kv_cache_groups_to_worker",
            "a983ff588f89b714be3f781315c743881482a4914cfd18161c7eb9b9c443fc2d",
        ),
    ),
)
