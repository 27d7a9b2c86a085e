"""How much a live vLLM engine holds, in the terms in which the gateway admits requests."""

from __future__ import annotations

from typing import Any

from ple_inference.vllm_engine.kv_figures import KvOptions, KvShape


def capacity(vllm_config: Any, model: str) -> dict[str, Any]:
    """Block counts as the engine reports them; which of them a request needs, by vLLM's planner."""
    from ple_inference.vllm_engine.kv_plan import plan_kv

    cache, scheduler, model_config = (
        vllm_config.cache_config,
        vllm_config.scheduler_config,
        vllm_config.model_config,
    )
    shape = KvShape.of(model_config.hf_text_config.to_dict(), images=bool(model_config.uses_mrope))
    options = KvOptions(
        max_model_len=model_config.max_model_len,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        kv_cache_dtype=cache.cache_dtype,
        prefix_caching=bool(cache.enable_prefix_caching),
    )
    # Blocks of a request are the same however layers are spread over stages.
    plan = plan_kv(shape, options, [len(shape.attention)], block_tokens=cache.block_size)
    return {
        "engine": "vllm",
        "model": model,
        # The engine counts one block that it never gives away.
        "num_blocks": cache.num_gpu_blocks - 1,
        "fixed_blocks_per_request": plan.fixed_blocks_per_request,
        "tokens_per_block": plan.tokens_per_block,
        "max_model_len": options.max_model_len,
        "max_num_seqs": options.max_num_seqs,
        "source": "blocks of the running engine; blocks of a request by vLLM's KV cache planner",
    }
