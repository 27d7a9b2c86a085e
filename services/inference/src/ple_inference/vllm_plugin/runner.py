"""The model runner that TriplexWorker makes: vLLM's, with the overrides that belong to it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from ple_inference.vllm_plugin import checkpoint_schemes
from ple_inference.vllm_plugin.overrides.pp_orphan_kv import without_orphans


class TriplexModelRunner(GPUModelRunner):
    skips_orphan_kv = False
    """Set by the override pp_orphan_kv."""
    reads_schemes = False
    """Set by the override checkpoint_schemes."""

    def load_model(self, load_dummy_weights: bool = False, *args: Any, **kwargs: Any) -> None:
        if self.reads_schemes:
            checkpoint_schemes.settle(self.vllm_config)
        super().load_model(load_dummy_weights, *args, **kwargs)

    def initialize_kv_cache(
        self,
        kv_cache_config: KVCacheConfig,
        is_profiling: bool = False,
        kv_cache_allocation_context: AbstractContextManager[None] | None = None,
    ) -> None:
        if self.skips_orphan_kv:
            kv_cache_config = without_orphans(kv_cache_config)
        super().initialize_kv_cache(kv_cache_config, is_profiling, kv_cache_allocation_context)
