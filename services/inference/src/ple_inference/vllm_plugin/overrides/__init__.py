"""Every change to vLLM, one file each. The order is the order of installation."""

from ple_inference.vllm_plugin.override import Override
from ple_inference.vllm_plugin.overrides import daemon_embedding, pp_config_gate, pp_model_state, pp_orphan_kv

ALL: tuple[Override, ...] = (
    pp_config_gate.OVERRIDE,
    pp_model_state.OVERRIDE,
    pp_orphan_kv.OVERRIDE,
    daemon_embedding.OVERRIDE,
)
