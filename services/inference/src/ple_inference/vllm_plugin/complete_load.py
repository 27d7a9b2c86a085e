"""Every weight of this rank came from the checkpoint: what is missing ends the start, and is named.

vLLM does not look when a checkpoint is quantized, and makes the scales of experts as ones: a scale that is
not loaded gives fluent text of another model.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from vllm.models.qwen4_exp.nvidia import model

from ple_inference.vllm_plugin.override import OverrideError

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")
_SHOWN = 3


def install() -> None:
    for cls in _models():
        if not hasattr(cls.load_weights, "unchecked"):
            cls.load_weights = _checked(cls.load_weights)


def is_live() -> bool:
    return all(hasattr(cls.load_weights, "unchecked") for cls in _models())


def _models() -> tuple[Any, Any]:
    return model.Qwen4ExpForCausalLM, model.Qwen4ExpForConditionalGeneration


def _checked(load_weights: Callable[..., set[str]]) -> Callable[..., set[str]]:
    """`load_weights` of a model, checked once: the text model within one with images is loaded in parts."""

    @wraps(load_weights)
    def load(self: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        if _Loading.now:
            return load_weights(self, weights)
        _Loading.now = True
        try:
            poison(self)
            experts = Experts()
            loaded = load_weights(self, experts.watch(weights))
        finally:
            _Loading.now = False
        experts.refuse_missing(_expert_count(self))
        refuse_unloaded(self, loaded)
        return loaded

    load.unchecked = load_weights  # type: ignore[attr-defined]
    return load


class _Loading:
    now = False


@torch.no_grad()
def poison(module: nn.Module) -> None:
    """Make every number NaN that the checkpoint must bring. Packed integers have none; their names tell."""
    for name, parameter in _numbers(module):
        parameter.data.fill_(torch.nan)
        if "input_mix_weight_down_block_inject" in name:
            parameter.data[len(parameter) - _padding(module, name) :] = 0


def refuse_unloaded(module: nn.Module, loaded: set[str]) -> None:
    """Raises OverrideError, naming parameters that were not loaded, or not in all their parts."""
    missing = [name for name, _ in module.named_parameters() if name not in loaded]
    missing = missing or [name for name, parameter in _numbers(module) if _has_nan(parameter)]
    if missing:
        _refuse(missing, "were not loaded in full")


class Experts:
    """Which experts of each layer a checkpoint brings, for each kind of their tensors."""

    def __init__(self) -> None:
        self._found: defaultdict[tuple[str, str], set[int]] = defaultdict(set)

    def watch(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, weight in weights:
            if (match := _EXPERT.match(name)) and not name.startswith("mtp."):
                self._found[match[1], match[3]].add(int(match[2]))
            yield name, weight

    def refuse_missing(self, count: int) -> None:
        """Raises OverrideError for an expert that lacks what another expert of the model has."""
        layers, kinds = ({key[part] for key in self._found} for part in (0, 1))
        missing = [
            f"{layer}.{number}.{kind}"
            for layer in sorted(layers)
            for kind in sorted(kinds)
            for number in sorted(set(range(count)) - self._found[layer, kind])
        ]
        if missing:
            _refuse(missing, "are not in the checkpoint")


def _refuse(names: list[str], fault: str) -> None:
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    raise OverrideError(
        f"triplex: complete_load: weights {fault}: {shown}: fetch the checkpoint again, or convert it anew"
    )


def _numbers(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Floating-point parameters but 8-bit ones, whose scales tell, and the one row in the table's place."""
    for name, parameter in module.named_parameters():
        wide = parameter.is_floating_point() and parameter.element_size() > 1
        if wide and not name.endswith("ple_embedding.ngram_embedding.weight"):
            yield name, parameter


def _has_nan(parameter: Tensor) -> bool:
    """By a sum: no copy of the size of an embedding is made."""
    return bool(parameter.data.sum(dtype=torch.float32).isnan())


def _expert_count(module: nn.Module) -> int:
    config: Any = module.config
    return int(getattr(config, "text_config", config).num_experts)


def _padding(module: nn.Module, name: str) -> int:
    """Rows that upstream adds below the merged down projection and never loads."""
    residual: Any = module.get_submodule(name.rsplit(".", 2)[0])
    return int(residual.pad_size)
