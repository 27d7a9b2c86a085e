"""Build embedding and output head only on the rank that uses them."""

from ple_inference.vllm_plugin.override import WORKER, Override, Upstream

_MODULE = "ple_inference.vllm_plugin.vocabulary_layers"

OVERRIDE = Override(
    name="placement",
    summary="embedding on the first stage only, output head on the last only",
    why="Every stage builds and loads both, 1.27 GB each in BF16 and 0.65 GB in INT8, and uses at "
    "most one of them. The vision tower and the last mixer are where they belong already.",
    without_it="Each stage holds both: with three stages, four copies that nobody reads.",
    remove_when="Qwen4ExpModel and Qwen4ExpForCausalLM give other ranks a PPMissingLayer, as "
    "Qwen3_5ForCausalLMBase does.",
    install=f"{_MODULE}:place",
    is_live=f"{_MODULE}:is_placed",
    places=WORKER,
    upstream=(
        Upstream(
            "vllm.models.qwen4_exp.nvidia.model:Qwen4ExpModel.__init__",
            "25f98f19ce71740508766ab5f18047c23ef50719f13e98c12538ba1289b7413a",
        ),
        Upstream(
            "vllm.models.qwen4_exp.nvidia.model:Qwen4ExpModel.forward",
            "6f6f8274357f698b5e9af14231b4bbbcf4abb06ae27d5449e131c5b7f699ebf3",
        ),
        Upstream(
            "vllm.models.qwen4_exp.nvidia.model:Qwen4ExpForCausalLM.__init__",
            "78930237feb8f19be41c749a3e56d3bd60888cd50dfc74ffb6608ff66e54cc07",
        ),
        Upstream(
            "vllm.models.qwen4_exp.nvidia.model:Qwen4ExpForConditionalGeneration.__init__",
            "bae0861640d77c02892a8308cff8aff4307e2c2595219966f086b106c8af3b17",
        ),
        Upstream(
            "vllm.model_executor.models.utils:PPMissingLayer",
            "076f23e9bd9741184b0b24abcf6820c9217ffb5fb5e8b23389a617c8c514482a",
        ),
        Upstream(
            "vllm.model_executor.models.utils:AutoWeightsLoader._load_module",
            "313d6007c15e2eae9827a14c4870bc4af950d72cc05f443be4a3023231bda68d",
        ),
        Upstream(
            "vllm.model_executor.model_loader.weight_tying:maybe_retie_word_embeddings",
            "f600e5df8fd859b8a515da07f2df571acbfc43925d6344ad6ef3b6689acbdf10",
        ),
        Upstream(
            "vllm.model_executor.models.interfaces:SupportsMultiModal._mark_tower_model",
            "a3122269fd51741d1c3675dc218fd01d33c4fe409d8afbc21a9e2f2478529648",
        ),
    ),
)
