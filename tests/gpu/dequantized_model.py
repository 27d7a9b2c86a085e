"""Transformers' text model in bf16, from a quantized checkpoint: decoded tensor by tensor on the device.

The host holds one tensor at a time. Every parameter is filled and every stored tensor used, or it raises.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import Qwen4ExpForCausalLM, Qwen4ExpTextConfig

from ple_inference.quantized.dequantize import dequantize, dequantize_blocks, dequantize_rows
from ple_inference.quantized.scheme import PACKED, SCALE, SHAPE, scheme_of

_FUSED = re.compile(r"(.*\.mlp\.experts)\.(gate_up|down)_proj$")
_TABLE = ".ngram_embedding.weight"


class Stored:
    """The tensors of a checkpoint by name; remembers which were read."""

    def __init__(self, folder: Path, files: ExitStack, device: str) -> None:
        index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
        opened = {
            file: files.enter_context(safe_open(folder / file, framework="pt"))
            for file in set(index.values())
        }
        self._files = {name: opened[file] for name, file in index.items()}
        self._device = device
        self.unread = set(index)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __getitem__(self, name: str) -> Tensor:
        self.unread.discard(name)
        return self._files[name].get_tensor(name).to(self._device)

    def weight(self, module: str) -> Tensor:
        """bf16 [N, K] of a projection, however it is stored."""
        if f"{module}{PACKED}" in self:
            scheme = scheme_of(module)
            assert scheme is not None, module
            rows, columns = self[module + SHAPE].tolist()
            packed, scale = self[module + PACKED], self[module + SCALE]
            return dequantize(packed, scale, scheme, (rows, columns), torch.bfloat16)
        weight = self[f"{module}.weight"]
        if weight.dtype == torch.float8_e4m3fn:
            return dequantize_blocks(weight, self[f"{module}.weight_scale_inv"], torch.bfloat16)
        return weight

    def table(self, module: str) -> Iterator[Tensor]:
        """bf16 rows of the n-gram table, a shard at a time."""
        scale = f"{module}.weight_scale"
        shard = 0
        while (name := f"{module}.shard_{shard}.weight") in self:
            rows = self[name]
            yield dequantize_rows(rows, self[scale]) if scale in self else rows
            shard += 1


def load(folder: Path, device: str) -> Any:
    """Qwen4ExpForCausalLM in bf16, for evaluation. Raises ValueError where names do not fit the model."""
    config = json.loads((folder / "config.json").read_text())
    if config["architectures"] != ["Qwen4ExpForCausalLM"]:
        raise ValueError(f"{folder} is of {config['architectures']}; the text model alone can be read")
    config.pop("quantization_config", None)
    with torch.device(device):
        model = Qwen4ExpForCausalLM._from_config(Qwen4ExpTextConfig(**config), dtype=torch.bfloat16)
    with ExitStack() as files, torch.no_grad():
        stored = Stored(folder, files, device)
        for name, parameter in model.named_parameters():
            _fill(name, parameter, stored)
        for name, buffer in model.named_buffers():
            if name in stored:
                buffer.copy_(stored[name])
    if stored.unread:
        raise ValueError(f"{folder}: {len(stored.unread)} tensors have no place, {min(stored.unread)} first")
    return model.eval()


def _fill(name: str, parameter: Tensor, stored: Stored) -> None:
    fused = _FUSED.match(name)
    if name.endswith(_TABLE):
        _fill_rows(parameter, stored.table(name.removesuffix(".weight")))
    elif fused and name not in stored:
        parts = ("gate", "up") if fused[2] == "gate_up" else ("down",)
        for expert, weight in enumerate(parameter):
            modules = (f"{fused[1]}.{expert}.{part}_proj" for part in parts)
            _fill_rows(weight, (stored.weight(module) for module in modules))
    elif name.endswith(".weight"):
        parameter.copy_(stored.weight(name.removesuffix(".weight")))
    else:
        parameter.copy_(stored[name])


def _fill_rows(parameter: Tensor, pieces: Iterable[Tensor]) -> None:
    """One below the other; they must fill it."""
    first = 0
    for piece in pieces:
        parameter[first : first + len(piece)] = piece
        first += len(piece)
    if first != len(parameter):
        raise ValueError(f"{first} rows for a parameter of {len(parameter)}")
