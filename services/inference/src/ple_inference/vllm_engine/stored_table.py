"""Refuses an n-gram table in a form that the daemon or vLLM does not serve."""

from __future__ import annotations

from ple_inference.vllm_engine.rank_modules import TABLE
from ple_inference.vllm_engine.refused import Refused
from ple_inference.vllm_engine.tensors import Tensors


def refuse_unserved_table(tensors: Tensors) -> None:
    """Raises Refused."""
    table = {name: tensor for name, tensor in tensors.items() if TABLE in name}
    for name, tensor in table.items():
        if tensor.dtype == "U8" or name.endswith("weight_scale_2"):
            raise Refused(f"{tensor.file.name}: {name} is of an NVFP4 table; bf16 and fp8 are served")
        if tensor.dtype == "F32":
            raise Refused(f"{tensor.file.name}: {name} is of an f32 table; bf16 and fp8 are served")
        scale = f"{name.partition(TABLE)[0]}{TABLE}weight_scale"
        if tensor.dtype.startswith("F8") and scale not in table:
            raise Refused(
                f"{tensor.file.name}: {name} is fp8 and the table has no weight_scale; download it again, or "
                "use another checkpoint"
            )
