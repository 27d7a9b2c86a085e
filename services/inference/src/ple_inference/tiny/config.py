"""What the tiny checkpoint's JSON files say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

TABLE_SHARDS = 8
MAX_POSITIONS = 32_768
HIDDEN = 64


@dataclass(frozen=True)
class SpecialIds:
    """Token ids that the config names, for one vocabulary."""

    vocab_size: int
    endoftext: int
    im_end: int
    vision_start: int
    vision_end: int
    image_pad: int
    video_pad: int


REAL = SpecialIds(248_320, 248_044, 248_046, 248_053, 248_054, 248_056, 248_057)
TINY = SpecialIds(512, 500, 502, 503, 504, 506, 507)


@dataclass(frozen=True)
class TinyOptions:
    """What decides a tiny checkpoint's content: equal options give equal bytes.

    `table_rows_base` is the config's ngram_vocab_size_base: the table has about 16 times as many rows.
    The default makes it 64 MiB in bf16, so that reading it is real work for the daemon.
    """

    vocab: Literal["real", "tiny"] = "real"
    dtype: Literal["bf16", "f32"] = "bf16"
    seed: int = 0
    layers: int = 4
    table_rows_base: int = 13_200

    def __post_init__(self) -> None:
        if self.layers < 4 or self.layers % 4:
            raise ValueError(f"--layers is {self.layers}; it must be a multiple of 4")
        if not 0 <= self.seed < 2**31:
            raise ValueError(f"--seed is {self.seed}; it must lie in [0, 2^31)")
        if not 16 <= self.table_rows_base <= 1_000_000:
            raise ValueError(f"--table-rows-base is {self.table_rows_base}; it must lie in [16, 1000000]")

    @property
    def ids(self) -> SpecialIds:
        return REAL if self.vocab == "real" else TINY


def model_config(options: TinyOptions) -> dict[str, Any]:
    """config.json in the released form: `full_attention` layers, no hash seed, the vision's old type."""
    ids = options.ids
    dtype = "bfloat16" if options.dtype == "bf16" else "float32"
    return {
        "architectures": ["Qwen4ExpForConditionalGeneration"],
        "model_type": "qwen4_exp",
        "dtype": dtype,
        "transformers_version": "5.16.1",
        "image_token_id": ids.image_pad,
        "video_token_id": ids.video_pad,
        "vision_start_token_id": ids.vision_start,
        "vision_end_token_id": ids.vision_end,
        "tie_word_embeddings": False,
        "text_config": {"dtype": dtype, **_text_config(options)},
        "vision_config": {"dtype": dtype, **VISION},
    }


def _text_config(options: TinyOptions) -> dict[str, Any]:
    ids = options.ids
    return {
        "model_type": "qwen4_exp_text",
        "vocab_size": ids.vocab_size,
        "bos_token_id": ids.endoftext,
        "eos_token_id": ids.endoftext,
        "num_hidden_layers": options.layers,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * (options.layers // 4),
        "ngram_vocab_size_base": options.table_rows_base,
        **TEXT,
    }


TEXT: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "hidden_act": "silu",
    "full_attention_interval": 4,
    "max_position_embeddings": MAX_POSITIONS,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    # sparse attention: past 19 visible keys a query selects
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000_000,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [2, 1, 1],
    },
    # gated delta-net
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "mamba_ssm_dtype": "float32",
    "output_gate_type": "sigmoid",
    # experts
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    # hyper-connections
    "hc_count": 4,
    "hc_lowrank": 16,
    # n-gram table, one-indexed: decoder layer 1; rows of 160 elements as in the released model
    "ple_layer_ids": [2],
    "ple_embed_dim": 2560,
    "ple_conv_kernel_size": 4,
    "ngram_size": 3,
    "heads_per_ngram": 8,
    "make_ngram_vocab_size_divisible_by": 128,
    "split_ngram_parts": TABLE_SHARDS,
    # draft module: Transformers ignores it, vLLM reads it
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "mtp": {
        "hybrid": True,
        "layer_types": ["full_attention"],
        "num_hidden_layers": 1,
        "rope_theta": 10_000_000,
    },
}

VISION: dict[str, Any] = {
    "model_type": "qwen4_exp",
    # Few and narrow heads: attention among an image's 8,192 patches is what a small CPU waits for.
    "depth": 2,
    "hidden_size": 48,
    "num_heads": 2,
    "intermediate_size": 96,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "in_channels": 3,
    "out_hidden_size": HIDDEN,
    "num_position_embeddings": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "deepstack_visual_indexes": [],
}


def generation_config(options: TinyOptions) -> dict[str, Any]:
    """generation_config.json: the released sampling defaults."""
    ids = options.ids
    return {
        "do_sample": True,
        "temperature": 1.0,
        "top_p": 0.95,
        "top_k": 20,
        "bos_token_id": ids.endoftext,
        "eos_token_id": [ids.im_end, ids.endoftext],
        "pad_token_id": ids.endoftext,
    }


PREPROCESSOR_CONFIG: dict[str, Any] = {
    "processor_class": "Qwen3VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
