"""Refuse a model of which a weight or a scale was not loaded."""

from ple_inference.vllm_plugin.override import WORKER, Override, Upstream

_MODULE = "ple_inference.vllm_plugin.complete_load"

OVERRIDE = Override(
    name="complete_load",
    summary="every weight and scale of the rank was loaded",
    why="vLLM checks what was loaded only without quantization, and makes the scales of experts as "
    "ones: a scale that is missing or not found gives fluent text of another model. Parameters "
    "are NaN before loading here, and names are counted.",
    without_it="What is missing is as memory was, and the scale of an expert is one: the model starts and "
    "answers wrongly, without a word. Packed weights without a scale are found by "
    "checkpoint_schemes before that.",
    remove_when="vLLM tracks loaded parameters, and each of their parts, for quantized checkpoints.",
    install=f"{_MODULE}:install",
    is_live=f"{_MODULE}:is_live",
    places=WORKER,
    upstream=(
        Upstream(
            "vllm.models.qwen4_exp.nvidia.model:Qwen4ExpForCausalLM.load_weights",
            "84faeb3806bc97215745c8395fdbc0b83587826ec425275f2846f51e0d3785ed",
            role="replaces",
        ),
        Upstream(
            "vllm.models.qwen4_exp.nvidia.model:Qwen4ExpForConditionalGeneration.load_weights",
            "d430da93471fb4f456897f2414829eb5980afa7dc6d940bdf01f8e0fae691eab",
            role="replaces",
        ),
        Upstream(
            "vllm.model_executor.models.utils:AutoWeightsLoader",
            "fb72d68c60f8a03e606a81273e49fd3f737721f37d600c77a649643db04fd4b0",
        ),
        Upstream(
            "vllm.model_executor.model_loader.default_loader:DefaultModelLoader.load_weights",
            "88f857820146ac83946874c9cdff79804fe3de081baee5694c832a4101871d2c",
        ),
        Upstream(
            "vllm.model_executor.model_loader.base_loader:BaseModelLoader.load_model",
            "517064828bea8a85de0ce3875dd229d5ea19d14d81f35645af1937a01c2d7290",
        ),
        Upstream(
            "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_wna16:CompressedTensorsWNA16MoEMethod.create_weights",
            "2829c72b14d683acc5ff53a869e86b03b3864d54978205d6ec1c5d86d48aebbb",
        ),
        Upstream(
            "vllm.models.qwen4_exp.nvidia.hyperconnection:GatedResidual.__init__",
            "3cd8bb7347975dea70397a02b26b67144930e4173c3f3816d7e97958b99c04b7",
        ),
        Upstream(
            "vllm.model_executor.layers.fused_moe.routed_experts:RoutedExperts.load_weights",
            "4d6682ef54174702a4e90a5da1cd9e99c0226c03bae34f5e39f9b61dffe33173",
        ),
    ),
)
