"""Let the model's config check pass with pipeline parallelism, and refuse what the plugin does not serve.

The three MODELS_CONFIG_MAP entries are replaced by subclasses. They decide only when vLLM has its whole
config, so that a process may hold engines that are none of ours: without TriplexWorker, or with this override
switched off, upstream's check runs as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ple_inference.vllm_plugin.override import EVERYWHERE, Override, OverrideError, Upstream

NAME = "pp_config_gate"
ARCHITECTURES = ("Qwen4ExpForConditionalGeneration", "Qwen4ExpForCausalLM", "Qwen4ExpMTP")
WORKER_CLASS = "ple_inference.vllm_plugin.worker.TriplexWorker"


class Gate:
    """Marks our entries in MODELS_CONFIG_MAP."""


def install() -> None:
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    for architecture in ARCHITECTURES:
        if architecture not in MODELS_CONFIG_MAP:
            raise OverrideError(
                f"triplex: {NAME}: vLLM checks no {architecture} in MODELS_CONFIG_MAP: this release serves "
                "vllm==0.33.0 only"
            )
        if not issubclass(MODELS_CONFIG_MAP[architecture], Gate):
            MODELS_CONFIG_MAP[architecture] = gated(MODELS_CONFIG_MAP[architecture])


def is_live() -> bool:
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    return all(issubclass(MODELS_CONFIG_MAP[architecture], Gate) for architecture in ARCHITECTURES)


def gated(upstream: Any) -> Any:
    """A subclass of one config class whose check goes through `verify`."""

    def verify_and_update_config(vllm_config: Any) -> None:
        verify(upstream.verify_and_update_config, vllm_config)

    namespace = {"verify_and_update_config": staticmethod(verify_and_update_config)}
    return type(f"Triplex{upstream.__name__}", (Gate, upstream), namespace)


def verify(upstream_check: Callable[[Any], None], vllm_config: Any) -> None:
    """Run upstream's check, as with one pipeline stage where the config is ours.

    Raises OverrideError for a config that is ours and not served.
    """
    from ple_inference.vllm_plugin import proof, switches

    options = switches.triplex_options(vllm_config.additional_config)
    if vllm_config.parallel_config.worker_cls != WORKER_CLASS:
        if options:
            raise OverrideError(
                f"triplex: --additional-config has triplex options, which need --worker-cls {WORKER_CLASS}"
            )
        upstream_check(vllm_config)
        return
    enabled = switches.enabled_overrides(vllm_config.additional_config)
    refuse_unserved(vllm_config)
    proof.prove_sources(enabled)
    if any(override.name == NAME for override in enabled):
        with _one_stage(vllm_config.parallel_config):
            upstream_check(vllm_config)
    else:
        upstream_check(vllm_config)


def refuse_unserved(vllm_config: Any) -> None:
    """One line for what the plugin has not been built for."""
    parallel, text = vllm_config.parallel_config, vllm_config.model_config.hf_text_config
    if parallel.tensor_parallel_size > 1:
        raise OverrideError(
            "triplex: tensor parallelism is not served "
            f"(tensor_parallel_size={parallel.tensor_parallel_size}): use --pipeline-parallel-size"
        )
    if parallel.data_parallel_size > 1:
        raise OverrideError(
            f"triplex: data parallelism is not served (data_parallel_size={parallel.data_parallel_size}): "
            "start one engine per replica"
        )
    layers = list(text.ple_layer_ids or ())
    if len(layers) > 1:
        raise OverrideError(
            f"triplex: {len(layers)} PLE layers (ple_layer_ids={layers}) are not served: "
            "the daemon holds the table of one"
        )
    if getattr(text, "ple_embedding_dtype", None) == "nvfp4":
        raise OverrideError(
            "triplex: an NVFP4 table is not served (ple_embedding_dtype=nvfp4): use a bf16 or fp8 checkpoint"
        )


@contextmanager
def _one_stage(parallel_config: Any) -> Iterator[None]:
    """Present one pipeline stage. With TP=1 the only other check that asks for the stages cannot fire.

    That one wants use_sequence_parallel_moe, which implies TP > 1; `refuse_unserved` has seen to it.
    """
    stages = parallel_config.pipeline_parallel_size
    parallel_config.pipeline_parallel_size = 1
    try:
        yield
    finally:
        parallel_config.pipeline_parallel_size = stages


OVERRIDE = Override(
    name=NAME,
    summary="the model's config check passes with pipeline parallelism",
    why="vLLM refuses a PLE table with pipeline_parallel_size > 1 because later stages would not receive the "
    "raw token ids. Its V2 runner gives them to every stage, and only the owner of the PLE layer needs them.",
    without_it="pipeline_parallel_size > 1 ends at start: Qwen4Exp N-gram PLE embedding requires "
    "pipeline_parallel_size=1. One stage is not affected.",
    remove_when="Qwen4ExpForConditionalGenerationConfig no longer refuses pipeline_parallel_size > 1.",
    install=f"{__name__}:install",
    is_live=f"{__name__}:is_live",
    places=EVERYWHERE,
    requires=("pp_model_state", "pp_orphan_kv"),
    upstream=(
        Upstream(
            "vllm.model_executor.models.config:Qwen4ExpForConditionalGenerationConfig",
            "841f9f64ff3f9f5e386490d445f6befb786b60df3123a2ff84a7dbea753acc05",
            role="replaces",
        ),
        Upstream(
            "vllm.model_executor.models.config:Qwen4ExpForCausalLMConfig",
            "91de20090087dd42a02831c39bb8f92b805fcbdaf15c8c3dabe877f3ee8b5231",
            role="replaces",
        ),
        Upstream(
            "vllm.model_executor.models.config:Qwen4ExpMTPConfig",
            "81419adcaaab09248da1b2dc793031dfb153dced7cca272a88991edd5b3433c2",
            role="replaces",
        ),
        Upstream(
            "vllm.model_executor.models.config:Qwen3_5ForConditionalGenerationConfig",
            "3ccd2ea9ab7ca6d1fed9d4e2a0527dec93c84524429fc494f87c2510a4176a75",
        ),
        Upstream(
            "vllm.config.vllm:VllmConfig.try_verify_and_update_config",
            "58b516809c6191baa70e2b86570ad0f2eb2abbfa04e0f35ae1e57818fabd2675",
        ),
        Upstream(
            "vllm.config.parallel:ParallelConfig.use_sequence_parallel_moe",
            "0e9b33cb2703a50aa618da6bb06a83bf6b2838eacc89853639aed4ba0782b692",
        ),
    ),
)
