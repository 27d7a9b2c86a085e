"""What decides the KV cache's size, and what comes out of vLLM's planner. Imports nothing of vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ple_inference.vllm_engine.linear_shapes import RECURRENT

# What an image adds to a cached raw key: three int64 positions, in bf16 elements, as vLLM lays them out.
_ROPE_ELEMENTS = 12


@dataclass(frozen=True)
class KvShape:
    """State of each kind of layer, as vLLM's layers report it. Elements, not bytes."""

    attention: tuple[bool, ...]
    """For each decoder layer whether it has attention (QSA); the others have a recurrent state (GDN)."""
    ple_layer: int
    kv_heads: int
    head_size: int
    head_size_v: int
    index_head_size: int
    ring_head_size: int
    compress_ratio: int
    gdn: tuple[int, int, int, int, int]
    """Key heads, value heads, key dim, value dim, convolution kernel."""
    state_dtype: str
    ple_channels: int
    ple_kernel: int
    """Of the n-gram layer's short convolution, dilation included."""

    @classmethod
    def of(cls, text: Mapping[str, Any], *, images: bool) -> KvShape:
        """From a checkpoint's text_config."""
        head_size = int(text["head_dim"])
        index_head_size = int(text["indexer_head_dim"])
        return cls(
            attention=tuple(kind != RECURRENT for kind in text["layer_types"]),
            ple_layer=text["ple_layer_ids"][0] - 1,
            kv_heads=int(text["num_key_value_heads"]),
            head_size=head_size,
            head_size_v=head_size,
            index_head_size=index_head_size,
            ring_head_size=index_head_size + (_ROPE_ELEMENTS if images else 0),
            compress_ratio=int(text["indexer_compress_ratio"]),
            gdn=(
                int(text["linear_num_key_heads"]),
                int(text["linear_num_value_heads"]),
                int(text["linear_key_head_dim"]),
                int(text["linear_value_head_dim"]),
                int(text["linear_conv_kernel_dim"]),
            ),
            state_dtype=str(text.get("mamba_ssm_dtype") or "float32"),
            ple_channels=int(text["hidden_size"]) * int(text["hc_count"]),
            ple_kernel=(int(text["ple_conv_kernel_size"]) - 1) * int(text["ngram_size"]) + 1,
        )


@dataclass(frozen=True)
class KvOptions:
    """What vLLM is told, as far as the cache depends on it."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_dtype: str = "auto"
    prefix_caching: bool = True
    drafts: int = 0
    """Draft tokens of each step."""

    @property
    def state_mode(self) -> Literal["align", "none"]:
        """How vLLM keeps recurrent states: prefix caching stores one with each block."""
        return "align" if self.prefix_caching else "none"


@dataclass(frozen=True)
class KvGroup:
    """Layers that share a block table: one block id of the pool holds a piece of all of them."""

    kind: str
    layers: int
    blocks_per_request: int
    """For a request of max_model_len."""
    grows: bool
    """Whether a longer request has more blocks of it."""


@dataclass(frozen=True)
class KvPlan:
    """The pool as vLLM would divide it."""

    block_tokens: int
    groups: tuple[KvGroup, ...]
    block_bytes: tuple[int, ...]
    """On each stage."""
    max_model_len: int
    pool_blocks: int = 0
    """As vLLM counts them, on every stage; 0: no memory was given."""

    @property
    def fixed_blocks_per_request(self) -> int:
        return sum(group.blocks_per_request for group in self.groups if not group.grows)

    @property
    def tokens_per_block(self) -> int:
        """Of a request beyond its fixed blocks."""
        return self.block_tokens // max(1, sum(group.grows for group in self.groups))

    @property
    def blocks_per_request(self) -> int:
        """Of a request of max_model_len."""
        return sum(group.blocks_per_request for group in self.groups)

    @property
    def usable_blocks(self) -> int:
        """vLLM never gives the first one away."""
        return max(0, self.pool_blocks - 1)

    @property
    def requests(self) -> float:
        """Requests of max_model_len that fit."""
        return self.usable_blocks / self.blocks_per_request
