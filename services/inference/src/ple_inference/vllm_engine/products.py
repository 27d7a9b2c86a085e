"""Which stored matrices vLLM multiplies as one: they must be stored alike, and are one module in memory."""

from __future__ import annotations

PRODUCTS = {
    "linear_attn.in_proj_qkvz": ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
    "linear_attn.in_proj_ba": ("linear_attn.in_proj_b", "linear_attn.in_proj_a"),
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.shared_expert.gate_up_proj": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    "ple.kv_proj": ("ple.key_proj", "ple.value_proj"),
}
"""vLLM's module of a decoder layer -> its parts in the checkpoint. The indexer's may differ, experts are one
stack: both are cases of their own."""
PRODUCT_OF = {part: product for product, parts in PRODUCTS.items() for part in parts}


def siblings(module: str) -> list[str]:
    """Modules that are multiplied together with this one, by its name in the checkpoint with any prefix."""
    for parts in PRODUCTS.values():
        for part in parts:
            if module.endswith(f".{part}"):
                head = module.removesuffix(part)
                return [head + other for other in parts if other != part]
    return []
