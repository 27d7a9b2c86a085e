"""The indexer of sparse attention apart from q, k and v, when it is stored otherwise."""

from ple_inference.vllm_plugin.override import WORKER, Override, Upstream

_MODULE = "ple_inference.vllm_plugin.split_qsa"

OVERRIDE = Override(
    name="qsa_projection",
    summary="the indexer's projection is its own product when its scheme differs",
    why="Upstream multiplies q, k, v and the indexer's projection in one product and takes the "
    "scheme of the first for all. The checkpoint has INT6 for three and INT8 for the fourth, so "
    "they are apart, as upstream has them for LoRA. Alike they stay together.",
    without_it="Loading the indexer's weights ends with an AssertionError about shapes when the schemes "
    "differ. Others are not affected.",
    remove_when="Qwen4ExpQSAAttention keeps the indexer's projection apart when its scheme is another.",
    install=f"{_MODULE}:install",
    is_live=f"{_MODULE}:is_live",
    places=WORKER,
    upstream=(
        Upstream(
            "vllm.models.qwen4_exp.nvidia.qsa:Qwen4ExpQSAAttention.__init__",
            "e1b5d3404d5a7dcb0ff411e8a5d1f691fbc82cd09e010b475a90b16343cd6e5b",
            role="replaces",
        ),
        Upstream(
            "vllm.models.qwen4_exp.nvidia.qsa:Qwen4ExpQSAAttention.load_weights",
            "bf98218f3a1da2d1e46cc7c0d5b407fc906c792ef11ee87e0aea0f0499a5bd66",
        ),
        Upstream(
            "vllm.models.qwen4_exp.nvidia.qsa:Qwen4ExpQSAAttention.forward",
            "7bc860d6652e59f02368431931da24b304bd8efd5ecc55e3fc7928818cd0bdf8",
        ),
        Upstream(
            "vllm.models.qwen4_exp.nvidia.qsa:Qwen4ExpQSAQKVIndexerLinear",
            "c8295e88bfdf9a8347e4475152cce2680e755086fc87110b65fa31a7cf26bb96",
        ),
        Upstream(
            "vllm.models.qwen4_exp.nvidia.indexer_qsa:QSAIndexer.__init__",
            "296708ab7d48cc9a6263e03952596cab2dbe614beac824e528050fac97aeac9e",
        ),
        Upstream(
            "vllm.models.qwen4_exp.nvidia.model:Qwen4ExpDecoderLayer.__init__",
            "dbfdaef620951e0f57be39c1c6dd49a6038690d16abc028a057b911d17555505",
        ),
        Upstream(
            "vllm.models.qwen4_exp.nvidia.model:Qwen4ExpForCausalLM.packed_modules_mapping",
            "61150e4588d80c115b27a92d2e9ac0449fd43d94a0ced808cb50260806d596a7",
        ),
        Upstream(
            "vllm.model_executor.layers.quantization.compressed_tensors.utils:_match_fused_layer",
            "322a693e2636a4b66bd430e64a8450ab22c0bbebf6e3ed571a51fe17cf57085c",
        ),
    ),
)
