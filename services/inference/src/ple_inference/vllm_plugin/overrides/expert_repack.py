"""Repack INT4 experts where they lie: a layer's experts are on the GPU once, not three times."""

from ple_inference.vllm_plugin.override import WORKER, Override, Upstream

_MODULE = "ple_inference.vllm_plugin.expert_repack"
_INT_WNA16 = "vllm.model_executor.layers.fused_moe.oracle.int_wna16"
_MARLIN = "vllm.model_executor.layers.quantization.utils.marlin_utils"

OVERRIDE = Override(
    name="expert_repack",
    summary="experts are repacked one at a time, in their own memory",
    why="vLLM repacks a layer's experts for Marlin from transposed copies of all of them, which live until "
    "the repacked ones are done: 512 experts of this model take 2.4 GiB more than they need, while the rest "
    "of the rank is loaded already. Repacked experts have as many bytes, and can take the old ones' place.",
    without_it="A rank that would fit ends out of memory as it loads, on 24 GB cards with 16 layers each.",
    remove_when="_process_weights_marlin makes no copy of all experts.",
    install=f"{_MODULE}:install",
    is_live=f"{_MODULE}:is_live",
    places=WORKER,
    upstream=(
        Upstream(
            f"{_INT_WNA16}:_process_weights_marlin",
            "f09441aaad35e51b1dfe5f81c13059c8b679fb1c4741fa5a77d2572bce367ade",
            role="replaces",
        ),
        Upstream(
            f"{_INT_WNA16}:convert_to_wna16_moe_kernel_format",
            "18db4633e370f21b3966da899a67639c2e753bfefd1e00278264a25da54a94ac",
        ),
        Upstream(
            f"{_MARLIN}:marlin_moe_permute_scales",
            "20827e920872cc60f9c2af46ad57e9e760c7ce9b3ef1520f9546b6be6e950c37",
        ),
        Upstream(
            f"{_MARLIN}:marlin_moe_padded_intermediate",
            "5275fe1919495123dba3ee53ead6da80ce88c28f211380e299c2fdd444b06e99",
        ),
        Upstream(
            "vllm._custom_ops:gptq_marlin_moe_repack",
            "42688ea395d73230aa31fedc4dc9e72a16d67a8adbceba865d1cfa121b91a30e",
        ),
        Upstream(
            "vllm.model_executor.utils:replace_parameter",
            "f679e589dfc0e453f505f7bf868a9be0572229bab436450c5da553b810118edd",
        ),
        Upstream(
            "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_wna16:CompressedTensorsWNA16MoEMethod.process_weights_after_loading",
            "87a165d99a43dd533a81268cf05680684bce951e5d16867f68557fc51f280224",
        ),
    ),
)
