"""Synthetic checkpoints, whole and with faults, for what builds and loads vLLM's model from them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ple_inference.quantized.packing import pack, unpack
from ple_inference.quantized.scheme import scheme_of
from ple_inference.synthetic.layout import files
from ple_inference.synthetic.options import SyntheticOptions
from ple_inference.synthetic.writer import write_checkpoint

LACKS = {
    "lacks-linear-scale": ".layers.0.linear_attn.out_proj.weight_scale",
    "lacks-packed": ".layers.0.linear_attn.out_proj.weight_packed",
    "lacks-shard": ".layers.3.self_attn.k_proj.weight_packed",
    "lacks-shard-scale": ".layers.3.self_attn.k_proj.weight_scale",
    "lacks-expert-scale": ".layers.2.mlp.experts.5.up_proj.weight_scale",
    "lacks-last-expert": ".layers.0.mlp.experts.5.",
    "lacks-expert": ".layers.1.mlp.experts.4.down_proj.weight_packed",
    "lacks-head-scale": "lm_head.weight_scale",
    "lacks-norm": ".layers.2.linear_attn.norm.weight",
    "lacks-plain-shard": ".layers.2.linear_attn.in_proj_b.weight",
    "lacks-fp8-scale": ".layers.0.mlp.experts.3.gate_proj.weight_scale_inv",
}


def make_all(root: Path) -> None:
    whole = {"int4": ("int4-mixed", False), "int4-images": ("int4-mixed", True), "fp8": ("fp8", False),
             "fp8-images": ("fp8", True), "bf16": ("none", False)}  # fmt: skip
    for name, (quant, images) in whole.items():
        options = SyntheticOptions(quant, "tiny", 4, 6, 100, "tiny", images)
        write_checkpoint(root / name, options, files(options), force=True, progress=lambda _: None)
    for name, part in LACKS.items():
        _changed(root / ("fp8" if "fp8" in name else "int4"), root / name, lambda at, part=part: part in at)
    _changed(root / "int4", root / "mixed", lambda name: False, _wider)
    _changed(root / "int4-images", root / "listed", lambda name: False)
    _reworded(root / "listed", lambda words: listed(words, root / "listed"))
    _changed(root / "fp8", root / "bare", lambda name: False)
    _reworded(root / "bare", lambda words: words | {"modules_to_not_convert": []})


def listed(words: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The same schemes in other words: modules by name as the checkpoint has them, without formats."""
    names = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    modules = [name.removesuffix(".weight_packed") for name in names if name.endswith(".weight_packed")]
    groups = {}
    for group in words["config_groups"].values():
        weights = group["weights"]
        found = [
            module
            for module in modules
            if (scheme := scheme_of(module))
            and (scheme.bits, scheme.group_size) == (weights["num_bits"], weights["group_size"])
        ]
        groups[f"group_{len(groups)}"] = {"targets": found, "weights": weights}
    return words | {"config_groups": groups, "ignore": ["re:model\\.visual\\..*"]}


def _reworded(folder: Path, reword: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = reword(config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))


def _changed(
    source: Path,
    target: Path,
    drops: Callable[[str], bool],
    change: Callable[[dict[str, Tensor]], None] = lambda tensors: None,
) -> None:
    """A copy whose files and index lack what `drops` says, after `change` was made to each file's tensors."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    for path in target.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        change(tensors)
        save_file({name: tensor for name, tensor in tensors.items() if not drops(name)}, path)
    index = json.loads((target / "model.safetensors.index.json").read_text())
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if not drops(name)}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))


def _wider(tensors: dict[str, Tensor]) -> None:
    """k_proj of layer 3 in 8 bits, beside q_proj and v_proj in 6."""
    name = "model.layers.3.self_attn.k_proj"
    if f"{name}.weight_packed" in tensors:
        columns = int(tensors[f"{name}.weight_shape"][1])
        tensors[f"{name}.weight_packed"] = pack(unpack(tensors[f"{name}.weight_packed"], 6, columns), 8)
