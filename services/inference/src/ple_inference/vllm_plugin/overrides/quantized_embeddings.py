"""Build embedding and output head as the checkpoint stores them."""

from ple_inference.vllm_plugin.override import WORKER, Override, Upstream

_MODULE = "ple_inference.vllm_plugin.vocabulary_layers"

OVERRIDE = Override(
    name="quantized_embeddings",
    summary="embedding and output head in the checkpoint's quantization",
    why="The model makes both without a quantization config, and the embedding without a name, so "
    "that their packed weights have no destination. vLLM has what it takes: rows dequantized "
    "where they are looked up, and Marlin for the head.",
    without_it="A checkpoint with packed ones ends with: There is no module or parameter named "
    "lm_head.weight_packed, or embed_tokens.weight_packed. Others are not affected.",
    remove_when="Qwen4ExpModel hands quant_config and prefix to VocabParallelEmbedding, and "
    "Qwen4ExpForCausalLM to ParallelLMHead.",
    install=f"{_MODULE}:quantize",
    is_live=f"{_MODULE}:is_quantized",
    places=WORKER,
    upstream=(
        Upstream(
            "vllm.models.qwen4_exp.nvidia.model:Qwen4ExpModel.__init__",
            "25f98f19ce71740508766ab5f18047c23ef50719f13e98c12538ba1289b7413a",
        ),
        Upstream(
            "vllm.models.qwen4_exp.nvidia.model:Qwen4ExpModel.embed_input_ids",
            "40eac6cd3359f25df651b0ab7ae35185124aa95e5bb7f2c1cde43ba31d619817",
        ),
        Upstream(
            "vllm.models.qwen4_exp.nvidia.model:Qwen4ExpForCausalLM.__init__",
            "78930237feb8f19be41c749a3e56d3bd60888cd50dfc74ffb6608ff66e54cc07",
        ),
        Upstream(
            "vllm.models.qwen4_exp.nvidia.model:Qwen4ExpForCausalLM.compute_logits",
            "9458c2eb931c821ddfa095b24af976652281ef231cdbf9718d56c024f095d4f1",
        ),
        Upstream(
            "vllm.model_executor.layers.vocab_parallel_embedding:VocabParallelEmbedding",
            "fa81d0366a34b9f3031dee0b393eef8ada6455ba4fe8a071dfb8d0d31239762c",
        ),
        Upstream(
            "vllm.model_executor.layers.vocab_parallel_embedding:ParallelLMHead",
            "960cf6246e0df6bc0915e299acdc33e057cd000aeb5fa6a96d1076e46b1494ea",
        ),
        Upstream(
            "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors:CompressedTensorsConfig.get_quant_method",
            "47f92715541725e3f3384250a7e04c1874532ea0a1f3991b3366664b7fd196a4",
        ),
        Upstream(
            "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_embedding:CompressedTensorsEmbeddingWNA16Int",
            "11046b12208592442f6d575dc142f301e1ba71de81edd23ad7545a3b8608ce61",
        ),
        Upstream(
            "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors:CompressedTensorsLinearMethod",
            "1d7d2f3cb6b7a430d3aa6d053d84986a823e90dd1faeaa0b221dbea00eff7685",
        ),
        Upstream(
            "vllm.model_executor.layers.logits_processor:LogitsProcessor",
            "b80c3c90597635ca183413e74dc37c80fd5e32c95e16602009a42c2f0eff73b8",
        ),
        Upstream(
            "vllm.models.qwen4_exp.nvidia.low_latency_gemm:enable_qwen4_exp_low_latency_gemm",
            "786765b54c78d7e32c704691e543b77b0552e2a850726f41ca4a66e9b3bffed4",
        ),
    ),
)
