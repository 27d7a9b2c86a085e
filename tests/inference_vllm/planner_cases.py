"""Asks `kv_plan` about the released model, in a process that has vLLM's Python files; prints JSON.

Not a test: the environment of tests cannot import vllm. test_plan.py runs it once and looks at what it says.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from types import SimpleNamespace

from ple_inference.vllm_engine.capacity import capacity
from ple_inference.vllm_engine.kv_figures import KvOptions, KvPlan, KvShape
from ple_inference.vllm_engine.kv_plan import NoRoom, plan_kv

GIB = 2**30
MAX_LEN = 262_144
SPLIT = (16, 16, 16)


def told(plan: KvPlan) -> dict:
    figures = ("blocks_per_request", "fixed_blocks_per_request", "tokens_per_block", "requests")
    return asdict(plan) | {name: getattr(plan, name) for name in figures}


def host_kv(shape: KvShape, block: int, *, caching: bool, drafts: int = 0) -> dict:
    """With K/V in host memory: a token keeps two bytes and a pooled key; a draft layer has attention."""
    off = replace(shape, kv_heads=1, head_size=1, head_size_v=0, ring_head_size=shape.index_head_size)
    off = replace(off, attention=off.attention + (True,) * drafts)
    options = KvOptions(MAX_LEN, 4, 512, prefix_caching=caching, drafts=drafts)
    return told(plan_kv(off, options, [len(off.attention)], block_tokens=block, padded=False))


def refused(shape: KvShape, options: KvOptions, kv_bytes: int) -> str:
    try:
        plan_kv(shape, options, SPLIT, kv_bytes=[kv_bytes] * 3)
    except NoRoom as error:
        return str(error)
    return ""


def live(text: dict, block_tokens: int) -> dict:
    """What the middleware would say of an engine with such a config."""
    config = SimpleNamespace(
        cache_config=SimpleNamespace(
            cache_dtype="fp8", enable_prefix_caching=True, block_size=block_tokens, num_gpu_blocks=244
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=512),
        model_config=SimpleNamespace(
            hf_text_config=SimpleNamespace(to_dict=lambda: text), uses_mrope=True, max_model_len=MAX_LEN
        ),
    )
    return capacity(config, "flash-next")


def main() -> None:
    text = json.load(sys.stdin)
    shape = KvShape.of(text, images=True)
    options = KvOptions(MAX_LEN, 4, 512)
    fp8 = replace(options, kv_cache_dtype="fp8")
    cases = {
        "host off": host_kv(shape, 12_144, caching=False),
        "host on": host_kv(shape, 12_144, caching=True),
        "host on, draft": host_kv(shape, 9_776, caching=True, drafts=1),
        "host off, 12160": host_kv(shape, 12_160, caching=False),
        "host on, 12160": host_kv(shape, 12_160, caching=True),
        "bf16": told(plan_kv(shape, options, SPLIT, kv_bytes=[4 * GIB] * 3)),
        "fp8": told(plan_kv(shape, fp8, SPLIT, kv_bytes=[4 * GIB, 3 * GIB, 4 * GIB])),
        "fp8, one stage": told(plan_kv(shape, fp8, [48])),
        "fp8, caching off": told(plan_kv(shape, replace(fp8, prefix_caching=False), SPLIT)),
        "no room": refused(shape, options, 2 * GIB),
        "live": live(text, 3136),
    }
    print(json.dumps(cases))


if __name__ == "__main__":
    main()
