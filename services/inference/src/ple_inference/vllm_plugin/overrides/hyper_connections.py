"""Hyper-connections whose low-rank projections are packed."""

from ple_inference.vllm_plugin.override import WORKER, Override, Upstream

_MODULE = "ple_inference.vllm_plugin.gated_residual"

OVERRIDE = Override(
    name="hyper_connections",
    summary="quantized hyper-connection projections beside a BF16 injection",
    why="Upstream builds them without a quantization config, and the down projection and the "
    "injection as one BF16 product. Packed INT8 and BF16 rows cannot be one product: they are "
    "apart here, which also halves 1.27 GB. What is stored in BF16 runs as upstream's.",
    without_it="A checkpoint with packed ones ends with: There is no module or parameter named "
    "...input_mix_weight_up.weight_packed. Others are not affected.",
    remove_when="GatedResidual takes a quant_config and keeps projections of different schemes apart.",
    install=f"{_MODULE}:install",
    is_live=f"{_MODULE}:is_live",
    places=WORKER,
    upstream=(
        Upstream(
            "vllm.models.qwen4_exp.nvidia.hyperconnection:GatedResidual",
            "315d323797665a70a9791912d51443d03f85fb00feddb9e71a7468a626424c63",
            role="replaces",
        ),
        Upstream(
            "vllm.models.qwen4_exp.nvidia.model:Qwen4ExpDecoderLayer.__init__",
            "dbfdaef620951e0f57be39c1c6dd49a6038690d16abc028a057b911d17555505",
        ),
        Upstream(
            "vllm.models.qwen4_exp.nvidia.model:Qwen4ExpDecoderLayer.forward",
            "7041e11f3e7a2df9dfcc306470b750548f5e9482903c92f96b19cb4af1c8df42",
        ),
        Upstream(
            "vllm.models.qwen4_exp.nvidia.model:Qwen4ExpModel.load_weights",
            "47cd1f43ccb1839c3e7ffcb9f3afa9485304f3280579f5e7844b7680d54240e2",
        ),
        Upstream(
            "vllm.models.qwen4_exp.nvidia.model:_EXTRA_WEIGHTS_MAPPER",
            "1e1315e97c824303143c32a02bd99309788fcec70b432e68d4ff383b46a62deb",
        ),
        Upstream(
            "vllm.models.qwen4_exp.nvidia.ops.hc:hc_silu",
            "e7948b3c81715ed6eb260519ebbb8c25f7491799ab6eb0b7737e53149b105d70",
        ),
        Upstream(
            "vllm.models.qwen4_exp.nvidia.ops.hc:hc_combine",
            "f6f85ff0aa664200d7bec1d7588621e40e2f861b976242e67ca0d2bae159d94b",
        ),
        Upstream(
            "vllm.models.qwen4_exp.nvidia.ops.hc:hc_combine_norm",
            "27c774d42b37e0c201b384ac207b5b58363e7c8bbf5bd1894313294094aec9a7",
        ),
        Upstream(
            "vllm.model_executor.layers.linear:ReplicatedLinear",
            "76af3d22aa49c54a184c9ee06f8bd22e5c4540725e8f293f556b8162b4113338",
        ),
        Upstream(
            "vllm.model_executor.models.utils:AutoWeightsLoader",
            "fb72d68c60f8a03e606a81273e49fd3f737721f37d600c77a649643db04fd4b0",
        ),
        Upstream(
            "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors:CompressedTensorsConfig.get_scheme_dict",
            "193a01d1ba2e06e986c19e8a15fe32a4db560821723651fb5805a4c7d2ad6585",
        ),
    ),
)
