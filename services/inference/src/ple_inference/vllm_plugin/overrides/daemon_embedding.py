"""Keep the n-gram table in the daemon: an embedding without a table that reads rows from a static buffer."""

from ple_inference.vllm_plugin.override import WORKER, Override, Upstream

_MODULE = "ple_inference.vllm_plugin.daemon_embedding"

OVERRIDE = Override(
    name="daemon_embedding",
    summary="the n-gram table stays in the daemon",
    why="vLLM can hold the table only in pinned host memory (95.4 GiB, which PyTorch rounds up to 128) or on "
    "the GPU. The daemon holds it on NVMe: no table memory is taken, no table weights are loaded, and rows "
    "come from a buffer that prepare_inputs fills before the forward, so that CUDA graphs may read it.",
    without_it="The worker that owns the PLE layer allocates the whole table in pinned memory and loads it "
    "from the checkpoint; the daemon is not asked.",
    remove_when="Never while the daemon holds the table.",
    install=f"{_MODULE}:install",
    is_live=f"{_MODULE}:is_live",
    places=WORKER,
    requires=("pp_model_state",),
    upstream=(
        Upstream(
            "vllm.models.qwen4_exp.common.ngram_embedding:Qwen4ExpPLEPinnedHostEmbedding",
            "38d4f9cf0efb796cbe2350d422a2c7a62275cefc805eeec1e1f5b26d9d54ae7c",
            role="replaces",
        ),
        Upstream(
            "vllm.models.qwen4_exp.nvidia.ngram_embedding:Qwen4ExpNGramEmbedding.load_weights",
            "ab2cdcf3bf4712377a7007459a0b4cd1ce4be28dfadb7ea30847875c73466405",
            role="replaces",
        ),
        Upstream(
            "vllm.models.qwen4_exp.common.ngram_embedding:Qwen4ExpPLEEmbedding",
            "8269dbcb0619f44220dd1ef3db5b8b6f8c00fd4d6461b1ca0453ff3fc3af5a9a",
        ),
        Upstream(
            "vllm.models.qwen4_exp.common.ngram_embedding:Qwen4ExpPLEEmbeddingMethod",
            "8f66dff1000e7d0f3b9aaab7ba65eee9c2040c9a32111e878fcdd963a62adbc4",
        ),
        Upstream(
            "vllm.models.qwen4_exp.common.ngram_embedding:Qwen4ExpPLEUnquantizedEmbeddingMethod",
            "81df87f25b48c91dc8408366962a6eb06239857145d173699816b75cc685eb95",
        ),
        Upstream(
            "vllm.models.qwen4_exp.common.ngram_embedding:Qwen4ExpPLEFp8EmbeddingMethod",
            "de50bd8dd0893843b3eade03f692a5624fe7b297acff767b33e04d84b95c8f3d",
        ),
        Upstream(
            "vllm.models.qwen4_exp.nvidia.ngram_embedding:Qwen4ExpNGramEmbedding.__init__",
            "dfe0669c209d34b8974ef4c75351149d417ff636f7f49dbd84415fa65dfaccaa",
        ),
        Upstream(
            "vllm.models.qwen4_exp.nvidia.ngram_embedding:Qwen4ExpNGramEmbedding.compute_ngram_ids",
            "5766f36598f9b97e4af03b70320b74a2d70e6155d783d705ff31e201fe160f46",
        ),
        Upstream(
            "vllm.models.qwen4_exp.nvidia.ngram_embedding:Qwen4ExpNGramEmbedding.start_prefetch",
            "97480eb54c01c4cbb0b131f930622856a99a2e14d36f913f1493954302933a84",
        ),
        Upstream(
            "vllm.models.qwen4_exp.nvidia.ngram_embedding:Qwen4ExpNGramEmbedding.forward",
            "d130797c96b4f376990b81289afb3543bd71c9d076cb0dfebbf42c0a1d7858ea",
        ),
        Upstream(
            "vllm.models.qwen4_exp.nvidia.ple_layer:Qwen4ExpPLELayer.forward",
            "6e0fc9d0676595a7bebd737420f261ad1bc1b851f5c373c276a1dad80577c6dd",
        ),
        Upstream(
            "vllm.models.qwen4_exp.nvidia.ple_layer:Qwen4ExpPLELayer._dequantize_embeddings",
            "2d1936c5e2d38375cf4d7f8e56325359948defef32a135000bfbde7218b5fba3",
        ),
        Upstream(
            "vllm.models.qwen4_exp.common.ops.ple:ple_ngram_ids",
            "2d0bb350542afa796e60b7315e92cccad052e15071a52a96bc9f562e59ee06f6",
        ),
        Upstream(
            "vllm.models.qwen4_exp.common.ops.ple:_ple_ngram_ids",
            "775bdaa5884f1928b9f4d47981a2504cb22d32e6b64808f52e2f4af9a12d684d",
        ),
        Upstream(
            "vllm.models.qwen4_exp.common.ops.ple:_ple_ngram_ids_kernel",
            "78e6b85fbdc2ec298aa04d82a8ac6e52fdaa9497115d88550cffc9aae7a6840e",
        ),
        Upstream(
            "vllm.model_executor.custom_op:PluggableLayer",
            "f7b376ead28dd6652655314a0da14cbf519d6ad04ca3e7e3c9d961fcce8d0987",
        ),
        Upstream(
            "vllm.model_executor.layers.vocab_parallel_embedding:VocabParallelEmbedding.__init__",
            "fa6cec0311af7151c9d0e1845a812900cd39beb1ab151c64f90538c032e8d337",
        ),
        Upstream(
            "vllm.v1.worker.gpu.model_runner:GPUModelRunner._remove_request",
            "800a8cb026f40474015c7dc87c7936161dd49af042cbff74d69d76eb5245ca73",
        ),
        Upstream(
            "vllm.v1.worker.gpu.model_runner:GPUModelRunner.add_requests",
            "1fc1f8be56e57bdf82d8439c4ce2fde502b79588af93eaf1b6f9fccfe894e753",
        ),
        Upstream(
            "vllm.v1.worker.gpu.model_runner:GPUModelRunner.update_pp_decode_requests",
            "3c2104cdc44c1d82e278084e1fb73587297b1179d5982c1e778bde5b8952914b",
        ),
        Upstream(
            "vllm.v1.worker.gpu.model_runner:GPUModelRunner.execute_model",
            "b881ac1a16b90e78e29784c0f8861405618d50eb47423ec268a9df7d74ee31f6",
        ),
        Upstream(
            "vllm.utils.gpu_sync_debug:gpu_sync_allowed",
            "1a8f56a649ca852b6437a89a4bb307ef4262304803569cc59ab51e6e52aa56bc",
        ),
    ),
)
