"""Asks vLLM's own planner how it would divide the KV cache. The only module here that imports vllm.

vLLM plans from what its layers report once they are built on GPUs. Here the same reports are written from the
config, with vLLM's classes, and given to the same functions; a namespace stands for the part of VllmConfig
that these read. What is not asked of vLLM is listed in docs/inference-vllm.md.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateDtypeCalculator, MambaStateShapeCalculator
from vllm.model_executor.models import ModelRegistry
from vllm.platforms.interface import Platform
from vllm.utils.math_utils import cdiv, round_up
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.core import kv_cache_planning
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheLayout,
    MambaSpec,
    MLAAttentionSpec,
    get_kv_quant_mode,
)

from ple_inference.vllm_engine.kv_figures import KvGroup, KvOptions, KvPlan, KvShape

Specs = dict[str, Any]
"""Layer name -> KVCacheSpec."""

_MODEL_DTYPE = torch.bfloat16
_ARCHITECTURE = "TriplexKvPlan"
_DEFAULT_BLOCK_TOKENS = 16


class NoRoom(Exception):
    """The pool does not hold one request of max_model_len; vLLM's words, in one line."""


def plan_kv(
    shape: KvShape,
    options: KvOptions,
    partition: Sequence[int],
    *,
    kv_bytes: Sequence[int] = (),
    block_tokens: int = 0,
    padded: bool = True,
) -> KvPlan:
    """Group the layers, and divide `kv_bytes` of each stage into blocks when given.

    `block_tokens` 0 takes the size that vLLM would align to; `padded` is whether states are padded to the
    page of one attention layer, as vLLM does with a size of its own. Raises NoRoom.
    """
    config = _config(options)
    if not block_tokens:
        block_tokens = _aligned_block_tokens(shape, options)
    attention = _attention_spec(shape, options, block_tokens)
    page_bytes = attention.page_size_bytes if padded else None
    stages = _stages(_layer_specs(shape, options, block_tokens, page_bytes), partition)
    groups = kv_cache_planning.get_global_kv_cache_groups(config, stages)
    plan = KvPlan(
        block_tokens=block_tokens,
        groups=tuple(_group(config, group) for group in groups),
        block_bytes=tuple(_block_bytes(config, groups, specs) for specs in stages),
        max_model_len=options.max_model_len,
    )
    if not kv_bytes:
        return plan
    try:
        divided = kv_cache_planning.get_kv_cache_configs(config, stages, list(kv_bytes), groups)
    except ValueError as error:
        raise NoRoom(" ".join(str(error).split())) from error
    return KvPlan(plan.block_tokens, plan.groups, plan.block_bytes, plan.max_model_len, divided[0].num_blocks)


def _layer_specs(
    shape: KvShape, options: KvOptions, block_tokens: int, page_bytes: int | None
) -> list[Specs]:
    """What each decoder layer would report."""
    states = _StateSpecs(shape, options, block_tokens, page_bytes)
    attention = {
        "qsa": _attention_spec(shape, options, block_tokens),
        "ring": CircularBufferSpec(
            block_size=round_up(shape.compress_ratio + options.drafts, shape.compress_ratio),
            num_kv_heads=1,
            head_size=shape.ring_head_size,
            head_size_v=0,
            dtype=_MODEL_DTYPE,
        ),
        "pooled": MLAAttentionSpec(
            block_size=block_tokens,
            num_kv_heads=1,
            head_size=shape.index_head_size,
            dtype=_MODEL_DTYPE,
            tokens_per_state=shape.compress_ratio,
        ),
    }
    layers = []
    for index, has_attention in enumerate(shape.attention):
        kinds = attention if has_attention else {"gdn": states.gdn}
        if index == shape.ple_layer:
            kinds = kinds | {"ple": states.ple}
        layers.append({f"{index}.{kind}": spec for kind, spec in kinds.items()})
    return layers


class _StateSpecs:
    """Reports of the layers whose state does not grow with the request."""

    def __init__(self, shape: KvShape, options: KvOptions, block_tokens: int, page_bytes: int | None) -> None:
        common = {
            "block_size": block_tokens if options.prefix_caching else options.max_model_len,
            "page_size_padded": page_bytes,
            "mamba_cache_mode": options.state_mode,
            "num_speculative_blocks": options.drafts,
        }
        self.gdn = MambaSpec(
            shapes=MambaStateShapeCalculator.gated_delta_net_state_shape(1, *shape.gdn, options.drafts),
            dtypes=MambaStateDtypeCalculator.gated_delta_net_state_dtype(
                _MODEL_DTYPE, "auto", shape.state_dtype
            ),
            **common,
        )
        self.ple = MambaSpec(
            shapes=MambaStateShapeCalculator.short_conv_state_shape(
                tp_world_size=1,
                intermediate_size=shape.ple_channels,
                conv_kernel=shape.ple_kernel,
                num_spec=options.drafts,
            ),
            dtypes=(_MODEL_DTYPE,),
            tp_replicated=True,
            **common,
        )


def _attention_spec(shape: KvShape, options: KvOptions, block_tokens: int) -> FullAttentionSpec:
    dtype = STR_DTYPE_TO_TORCH_DTYPE.get(options.kv_cache_dtype, _MODEL_DTYPE)
    return FullAttentionSpec(
        block_size=block_tokens,
        num_kv_heads=shape.kv_heads,
        head_size=shape.head_size,
        head_size_v=shape.head_size_v,
        dtype=dtype,
        kv_quant_mode=get_kv_quant_mode(options.kv_cache_dtype),
    )


def _stages(layers: Sequence[Specs], partition: Sequence[int]) -> list[Specs]:
    rest = iter(layers)
    return [{name: spec for _ in range(count) for name, spec in next(rest).items()} for count in partition]


def _group(config: Any, group: Any) -> KvGroup:
    spec = group.kv_cache_spec
    first = next(iter(getattr(spec, "kv_cache_specs", {"": spec}).values()))
    return KvGroup(
        kind=group.layer_names[0].partition(".")[2],
        layers=len(group.layer_names),
        blocks_per_request=cdiv(spec.max_memory_usage_bytes(config), spec.page_size_bytes),
        grows=not isinstance(first, MambaSpec | CircularBufferSpec),
    )


def _block_bytes(config: Any, groups: Any, specs: Specs) -> int:
    """What one block takes of a stage's memory."""
    own = kv_cache_planning._project_kv_cache_groups_to_worker(groups, specs)
    return int(kv_cache_planning._pool_bytes_per_block(config, own))


def _config(options: KvOptions) -> Any:
    """What the planner reads of VllmConfig."""
    layout = KVCacheLayout.BLNHC
    return SimpleNamespace(
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: layout,
            mamba_cache_mode=options.state_mode,
            num_gpu_blocks_override=None,
            prefix_cache_retention_interval=0,
        ),
        model_config=SimpleNamespace(
            max_model_len=options.max_model_len,
            original_max_model_len=options.max_model_len,
            supports_kv_cache_grouping=False,
        ),
        scheduler_config=SimpleNamespace(
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            disable_hybrid_kv_cache_manager=False,
        ),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, prefill_context_parallel_size=1, tensor_parallel_size=1
        ),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None,
        num_prefill_lookahead_tokens=options.drafts,
    )


def _aligned_block_tokens(shape: KvShape, options: KvOptions) -> int:
    """The block size that vLLM comes to when it makes an attention page hold a state."""
    states = _StateSpecs(shape, options, block_tokens=_DEFAULT_BLOCK_TOKENS, page_bytes=None)
    cache = SimpleNamespace(
        cache_dtype=options.kv_cache_dtype,
        block_size=_DEFAULT_BLOCK_TOKENS,
        mamba_cache_mode=options.state_mode,
        mamba_page_size_padded=None,
        kv_cache_dtype_skip_layers=[],
    )
    model = SimpleNamespace(
        dtype=_MODEL_DTYPE,
        use_mla=False,
        get_num_kv_heads=lambda _: shape.kv_heads,
        get_head_size=lambda: shape.head_size,
        architecture=_ARCHITECTURE,
        model_impl="vllm",
    )
    config = SimpleNamespace(
        cache_config=cache,
        model_config=model,
        parallel_config=None,
        compilation_config=SimpleNamespace(static_forward_context={}),
        state_specs=(states.gdn, states.ple),
    )
    # It looks for methods that a model which runs would have, and says so.
    logging.getLogger("vllm").setLevel(logging.ERROR)
    ModelRegistry.register_model(_ARCHITECTURE, _PlannedModel)
    Platform._align_hybrid_block_size(config, _PlannedBackend)
    return int(cache.block_size)


class _PlannedModel(torch.nn.Module):
    """Stands in vLLM's registry for the model class, of which the alignment asks one thing."""

    @classmethod
    def get_mamba_specs_from_config(cls, config: Any) -> tuple[Any, ...]:
        specs: tuple[Any, ...] = config.state_specs
        return specs


class _PlannedBackend:
    """QSA's backend as far as block sizes go; importing the real one takes kernels that a CPU lacks."""

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[MultipleOf]:
        return [MultipleOf(_DEFAULT_BLOCK_TOKENS)]

    @staticmethod
    def customize_spec(spec: Any) -> Any:
        return spec
