"""Synthetic quantized checkpoints of the released shapes, whole and with one tensor missing."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file

from ple_inference.synthetic.layout import files
from ple_inference.synthetic.options import SyntheticOptions
from ple_inference.synthetic.writer import write_checkpoint

INDEX = "model.safetensors.index.json"


def run(settings: dict[str, Any]) -> dict[str, Any]:
    """Writes `model` by the other settings, unless it is there, and beside it what lacks one tensor."""
    folder = Path(settings["model"])
    if not (folder / INDEX).exists():
        options = SyntheticOptions(settings["quant"], "real", settings["layers"], settings["experts"])
        write_checkpoint(folder, options, files(options), force=True, progress=lambda _: None)
    if "lacks" in settings:
        copy_without(folder, Path(settings["faulty"]), settings["lacks"])
    if "listed" in settings:
        copy_listed(folder, Path(settings["listed"]))
    return {"gib": sum(path.stat().st_size for path in folder.iterdir()) / 2**30}


def copy_without(source: Path, target: Path, name: str) -> None:
    """All but the file of one tensor is linked; that is written again without it."""
    index = json.loads((source / INDEX).read_text())
    file = index["weight_map"].pop(name)
    _link(source, target, {INDEX, file})
    _copy_file(source / file, target / file, {name})
    (target / INDEX).write_text(json.dumps(index))


def copy_listed(source: Path, target: Path) -> None:
    """The same weights under a config whose groups list modules as the multimodal architecture names them."""
    config = json.loads((source / "config.json").read_text())
    for group in config["quantization_config"]["config_groups"].values():
        group["targets"] = [
            f"re:model\\.language_model\\.{target.removeprefix('re:')}" for target in group["targets"]
        ]
    _link(source, target, {"config.json"})
    (target / "config.json").write_text(json.dumps(config))


def _copy_file(source: Path, target: Path, but: set[str]) -> None:
    with safe_open(source, framework="pt") as stored:
        save_file({key: stored.get_tensor(key) for key in stored.keys() if key not in but}, target)  # noqa: SIM118


def _link(source: Path, target: Path, but: set[str]) -> None:
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for path in source.iterdir():
        if path.name not in but:
            os.link(path, target / path.name)
