"""The input embedding and the output head where Qwen4ExpModel makes them: on whose rank, and how stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.config import get_current_vllm_config
from vllm.distributed import get_pp_group
from vllm.model_executor.models.utils import PPMissingLayer
from vllm.models.qwen4_exp.nvidia import model

EMBEDDING, HEAD = "VocabParallelEmbedding", "ParallelLMHead"


@dataclass
class Maker:
    """Stands in the model's module for a class of vLLM, and makes its layer."""

    upstream: Any
    on_first_rank: bool
    """The rank that uses the layer is the first, or else the last."""
    where_used: bool = False
    """Set by the override placement."""
    quantized: bool = False
    """Set by the override quantized_embeddings."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.where_used and not self._is_here():
            return PPMissingLayer()
        if self.quantized:
            config = get_current_vllm_config()
            kwargs = {"prefix": embedding_name(config.model_config)} | kwargs
            kwargs["quant_config"] = config.quant_config
        return self.upstream(*args, **kwargs)

    def _is_here(self) -> bool:
        group = get_pp_group()
        return bool(group.is_first_rank if self.on_first_rank else group.is_last_rank)


def makers() -> tuple[Maker, Maker]:
    """Of embedding and head, put into the model's module by the first call."""
    for name in (EMBEDDING, HEAD):
        made = getattr(model, name)
        if not isinstance(made, Maker):
            setattr(model, name, Maker(made, on_first_rank=name == EMBEDDING))
    return model.VocabParallelEmbedding, model.ParallelLMHead


def embedding_name(model_config: Any) -> str:
    """What vLLM calls the embedding, which is made without a name: with images the model is an inner one."""
    inner = model_config.architecture == "Qwen4ExpForConditionalGeneration"
    return "language_model.model.embed_tokens" if inner else "model.embed_tokens"


def place() -> None:
    for maker in makers():
        maker.where_used = True


def is_placed() -> bool:
    return all(maker.where_used for maker in makers())


def quantize() -> None:
    for maker in makers():
        maker.quantized = True


def is_quantized() -> bool:
    return all(maker.quantized for maker in makers())
