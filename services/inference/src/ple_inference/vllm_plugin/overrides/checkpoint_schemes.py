"""Read from the tensors which weights are quantized, and how, instead of from the words of config.json."""

from ple_inference.vllm_plugin.override import WORKER, Override, Upstream

_MODULE = "ple_inference.vllm_plugin.checkpoint_schemes"

OVERRIDE = Override(
    name="checkpoint_schemes",
    summary="the scheme of every weight is read from the checkpoint's tensors",
    why="vLLM matches the groups of quantization_config against its own module names: a regex that "
    "begins with model.language_model, a listed lm_head or a group without a format of its own "
    "finds nothing with images, and an FP8 config without a list of BF16 modules makes all of "
    "them FP8. Shapes of the tensors say it without names.",
    without_it="A module that config.json does not name as vLLM does is built in BF16, and loading ends "
    "with: There is no module or parameter named ...weight_packed. BF16 weights of such an FP8 "
    "checkpoint are cast to FP8 without a scale.",
    remove_when="vLLM resolves targets in the checkpoint's names for both architectures, and takes modules "
    "without scales as unquantized.",
    install=f"{_MODULE}:install",
    is_live=f"{_MODULE}:is_live",
    places=WORKER,
    upstream=(
        Upstream(
            "vllm.v1.worker.gpu.model_runner:GPUModelRunner.load_model",
            "8dc6fae305bb73a89a0b1a1bf08bfc8fbd1a7d9dacab10076f6a00b667e97e88",
        ),
        Upstream(
            "vllm.model_executor.model_loader.utils:configure_quant_config",
            "5fad273f0503af597db18a611bf9906e2994aa3b858f71161c106033443595b6",
        ),
        Upstream(
            "vllm.model_executor.model_loader.utils:initialize_model",
            "07eafecb5d69c8ba0be794b8aa0c7b58d79824811c05611b82a8accf508ea76f",
        ),
        Upstream(
            "vllm.model_executor.models.utils:WeightsMapper",
            "b02c9b04349cdb9915d9bc8a4d0b9a25aacc805300f80276136ec715820c3962",
        ),
        Upstream(
            "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors:CompressedTensorsConfig.apply_vllm_mapper",
            "0c96658ccaf55a2523605ea945678f5fcf504f224f43f0481f631cd54b994e7e",
            role="replaces",
        ),
        Upstream(
            "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors:CompressedTensorsConfig.get_scheme_dict",
            "193a01d1ba2e06e986c19e8a15fe32a4db560821723651fb5805a4c7d2ad6585",
        ),
        Upstream(
            "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors:CompressedTensorsConfig.get_quant_method",
            "47f92715541725e3f3384250a7e04c1874532ea0a1f3991b3366664b7fd196a4",
        ),
        Upstream(
            "vllm.model_executor.layers.quantization.compressed_tensors.utils:find_matched_target",
            "653c15b9000c15c4508fe69fd0a8d8d06ca6c7603f9a54913e78c0da9ef0a7bc",
        ),
        Upstream(
            "vllm.model_executor.layers.quantization.compressed_tensors.utils:_match_fused_layer",
            "322a693e2636a4b66bd430e64a8450ab22c0bbebf6e3ed571a51fe17cf57085c",
        ),
        Upstream(
            "vllm.model_executor.layers.quantization.compressed_tensors.utils:should_ignore_layer",
            "8368500871a2c02aa7eac7a15110caf0429a92a81ce4cc5c0b747406b4f4eb9d",
        ),
        Upstream(
            "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe:CompressedTensorsMoEMethod.get_moe_method",
            "860150fdd47c88bd3f9115ab0ddc091e6d1bdef9d88ae4134edf9809ebceb40a",
        ),
        Upstream(
            "vllm.model_executor.layers.quantization.compressed_tensors.schemes.compressed_tensors_wNa16:CompressedTensorsWNA16",
            "e2f75a86a846fb46722f4bcd320b979567e427c7907d1d7e8f226281785c3b58",
        ),
        Upstream(
            "vllm.model_executor.layers.quantization.fp8:Fp8Config",
            "b5ae74ea3e49e7607c5bff87d419ce00286091fe403327b8821052efcd42ae39",
        ),
        Upstream(
            "vllm.model_executor.layers.quantization.utils.quant_utils:is_layer_skipped",
            "eb628705e90f79ce8edcd2a4d7ec4b4ba9edd2689e5c9c4b1aeae5fddd1ef3a7",
        ),
    ),
)
