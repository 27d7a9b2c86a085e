"""Checkpoints of the released text shapes with fewer layers and experts, made by the product's own writer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from tqdm import tqdm

from ple_inference.synthetic.config import model_config
from ple_inference.synthetic.layout import files
from ple_inference.synthetic.options import SyntheticOptions
from ple_inference.synthetic.writer import size_bytes, write_checkpoint, write_weights
from ple_inference.tiny.folder import write_json

PLE = "model.layers.1.ple.ple_embedding"
_INDEX = "model.safetensors.index.json"


def run(settings: dict[str, Any]) -> dict[str, Any]:
    options = {name: value for name, value in settings.items() if name != "model"}
    write(Path(settings["model"]), SyntheticOptions(**options))
    return {}


def write(folder: Path, options: SyntheticOptions) -> None:
    grouped = files(options)
    with tqdm(total=size_bytes(grouped), desc="checkpoint", unit="B", unit_scale=True) as bar:
        write_checkpoint(folder, options, grouped, force=False, progress=bar.update)


def write_config(folder: Path, options: SyntheticOptions) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", model_config(options))


def write_table(folder: Path, options: SyntheticOptions) -> None:
    """Only what the daemon reads: for a model whose weights are made up. Not again where it is."""
    if (folder / _INDEX).exists():
        return
    write_config(folder, options)
    of_table = [[spec for spec in specs if PLE in spec.name] for specs in files(options)]
    write_weights(folder, options, [specs for specs in of_table if specs], progress=lambda _: None)


def read_table(folder: Path) -> Tensor:
    """uint8 [rows, bytes of a row] of the whole table, in memory."""
    shards = json.loads((folder / "config.json").read_text())["split_ngram_parts"]
    index = json.loads((folder / _INDEX).read_text())["weight_map"]
    parts = []
    for shard in range(shards):
        name = f"{PLE}.ngram_embedding.shard_{shard}.weight"
        with safe_open(folder / index[name], framework="pt") as file:
            parts.append(file.get_tensor(name))
    return torch.cat(parts).view(torch.uint8)
