"""Every change to vLLM, one file each. The order is the order of installation."""

from ple_inference.vllm_plugin.override import Override
from ple_inference.vllm_plugin.overrides import (
    checkpoint_schemes,
    complete_load,
    daemon_embedding,
    expert_repack,
    hyper_connections,
    placement,
    pp_config_gate,
    pp_model_state,
    pp_orphan_kv,
    pp_step_stream,
    qsa_projection,
    quantized_embeddings,
)

ALL: tuple[Override, ...] = (
    pp_config_gate.OVERRIDE,
    pp_model_state.OVERRIDE,
    pp_orphan_kv.OVERRIDE,
    pp_step_stream.OVERRIDE,
    daemon_embedding.OVERRIDE,
    checkpoint_schemes.OVERRIDE,
    placement.OVERRIDE,
    quantized_embeddings.OVERRIDE,
    hyper_connections.OVERRIDE,
    qsa_projection.OVERRIDE,
    complete_load.OVERRIDE,
    expert_repack.OVERRIDE,
)
