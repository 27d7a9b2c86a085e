"""Give both architectures the model state that knows pipeline stages and the daemon.

`get_model_state_cls` is upstream's hook for this. It is set on the two model classes and not by registering
subclasses of them: a registration is made in every process before any config is known, so that it could not
be switched off.
"""

from __future__ import annotations

from typing import Any

from ple_inference.vllm_plugin.override import WORKER, Override, Upstream


def model_state_cls() -> Any:
    from ple_inference.vllm_plugin.model_state import TriplexModelState

    return TriplexModelState


def install() -> None:
    for model in _models():
        model.get_model_state_cls = staticmethod(model_state_cls)


def is_live() -> bool:
    return all(model.get_model_state_cls is model_state_cls for model in _models())


def _models() -> tuple[Any, Any]:
    from vllm.models.qwen4_exp.nvidia import model

    return model.Qwen4ExpForCausalLM, model.Qwen4ExpForConditionalGeneration


OVERRIDE = Override(
    name="pp_model_state",
    summary="the model state of Triplex: pipeline stages, and the seam of the daemon's lookups",
    why="Qwen4ExpModelState refuses pipeline parallelism a second time, and prepares n-gram context on ranks "
    "that own no PLE layer; its prepare_inputs is where rows are fetched from the daemon.",
    without_it="pipeline_parallel_size > 1 ends while the model loads: N-gram PLE embedding currently "
    "requires pipeline_parallel_size=1. Nothing looks up rows in the daemon.",
    remove_when="Never while the daemon holds the table; its pipeline part when Qwen4ExpModelState.__init__ "
    "no longer refuses pipeline_parallel_size > 1.",
    install=f"{__name__}:install",
    is_live=f"{__name__}:is_live",
    places=WORKER,
    upstream=(
        Upstream(
            "vllm.models.qwen4_exp.nvidia.model:Qwen4ExpForCausalLM.get_model_state_cls",
            "f20e00490da2d5d2b46eaa6f2364f0e3f19b24650d6a17f701453d65d51cda32",
            role="replaces",
        ),
        Upstream(
            "vllm.models.qwen4_exp.nvidia.model:Qwen4ExpForConditionalGeneration.get_model_state_cls",
            "f20e00490da2d5d2b46eaa6f2364f0e3f19b24650d6a17f701453d65d51cda32",
            role="replaces",
        ),
        Upstream(
            "vllm.models.qwen4_exp.nvidia.model_state:Qwen4ExpModelState",
            "e9cce289c6568a0aab0cb3d8ddab72823147a80d97730c1dfc5993d8a05cf14c",
        ),
        Upstream(
            "vllm.v1.worker.gpu.model_states:resolve_model_state_cls",
            "68629f6be0585b4161befc625e59fee1586cbb9d48a30848eebbc55b02248eec",
        ),
        Upstream(
            "vllm.v1.worker.gpu.model_states:init_model_state",
            "1260f3ca27298450279d2b9d387903f4c35e09f322aa70b5cc8370822ef079ae",
        ),
        Upstream(
            "vllm.v1.worker.gpu.model_states.mamba_hybrid:MambaHybridModelState.__init__",
            "8a17d47093ccb0f9621182cd5431f45776ce693ae411603bc586350d29df8199",
        ),
        Upstream(
            "vllm.v1.worker.gpu.model_states.mamba_hybrid:MambaHybridModelState.add_request",
            "d0e0032afc2ffec50c4f7ecd43ad31ed0620410c6849b3da43be112b163cbeac",
        ),
        Upstream(
            "vllm.v1.worker.gpu.model_states.interface:ModelState.__init__",
            "37d7d7e533b7e7ecd62211a709d9e371dd31b2d38bf7d72c9ddb6be997d35f36",
        ),
        Upstream(
            "vllm.v1.worker.gpu.model_states.interface:ModelState.remove_request",
            "f6e833ff5b952a78ab91b05ac3cebdf439ab859d2c894f9df769a3314706d033",
        ),
        Upstream(
            "vllm.models.qwen4_exp.nvidia.model:Qwen4ExpModel._start_layer_ple_prefetch",
            "bb2377a529acacadaac5fdabadc4bcc3fda3afd2ba47bf4b97144f9dfbd172cd",
        ),
    ),
)
