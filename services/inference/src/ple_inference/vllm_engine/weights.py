"""How many bytes of a checkpoint each GPU holds, and what of it this engine cannot load."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ple_inference.vllm_engine.pipeline import Pipeline
from ple_inference.vllm_engine.refused import Refused
from ple_inference.vllm_engine.tensors import Tensors

TABLE = ".ple_embedding.ngram_embedding."
_LAYER = re.compile(r"\.layers\.(\d+)\.")
# vLLM builds these two on every stage, and builds them and the hyper-connections without quantization.
_EVERYWHERE = (".embed_tokens.", "lm_head.")
_UNQUANTIZED = (*_EVERYWHERE, "hyper_connection")


@dataclass(frozen=True)
class StageWeights:
    """Bytes of one stage's weights, as the checkpoint stores them."""

    layers_bytes: int
    embed_and_head_bytes: int
    vision_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.layers_bytes + self.embed_and_head_bytes + self.vision_bytes


def stage_weights(tensors: Tensors, pipeline: Pipeline) -> tuple[StageWeights, ...]:
    """What each stage loads: not the table, which the daemon has, and not the draft layer (MTP)."""
    layers = [0] * pipeline.stages
    everywhere = vision = 0
    for name, tensor in tensors.items():
        layer = _LAYER.search(name)
        if TABLE in name or name.startswith("mtp."):
            continue
        if name.startswith("model.visual."):
            vision += tensor.size_bytes
        elif any(part in f".{name}" for part in _EVERYWHERE):
            everywhere += tensor.size_bytes
        else:
            # What ends the model belongs to no layer and to the last stage.
            stage = pipeline.stage_of(int(layer.group(1))) if layer else pipeline.stages - 1
            layers[stage] += tensor.size_bytes
    return tuple(
        StageWeights(size_bytes, everywhere, vision if stage == 0 else 0)
        for stage, size_bytes in enumerate(layers)
    )


def refuse_unloadable(tensors: Tensors) -> None:
    """Raises Refused for a table or weights in a form that is not built yet."""
    for name, tensor in tensors.items():
        if TABLE in name and (tensor.dtype == "U8" or name.endswith("weight_scale_2")):
            raise Refused(f"{tensor.file.name}: {name} is of an NVFP4 table; bf16 and fp8 are served")
        if TABLE in name and tensor.dtype == "F32":
            raise Refused(f"{tensor.file.name}: {name} is of an f32 table; bf16 and fp8 are served")
        if name.endswith("weight_packed") and any(part in f".{name}" for part in _UNQUANTIZED):
            raise Refused(
                f"{tensor.file.name}: {name} is quantized; quantized embeddings, output heads and "
                "hyper-connections are not built yet: use a checkpoint that has them in bf16"
            )
