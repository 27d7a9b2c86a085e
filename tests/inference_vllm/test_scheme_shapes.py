"""Shapes of packed weights as the worker meets them: one line, and no division by zero."""

from __future__ import annotations

import struct
from math import prod
from pathlib import Path
from typing import Any

import pytest
import released_layout

from ple_inference.vllm_engine.tensors import Tensors
from ple_inference.vllm_plugin.checkpoint_schemes import packed_schemes
from ple_inference.vllm_plugin.override import OverrideError

MODULE = "model.layers.3.self_attn.o_proj"
GOOD: dict[str, Any] = {"packed": [8, 32], "scale": [8, 2], "shape": (8, 256)}


def write(folder: Path, **changes: Any) -> Tensors:
    parts = GOOD | changes
    released_layout.write_headers(
        folder,
        {
            f"{MODULE}.weight_packed": ("I32", parts["packed"]),
            f"{MODULE}.weight_scale": ("F16", parts["scale"]),
            f"{MODULE}.weight_shape": ("I64", [len(parts["shape"])]),
        },
    )
    numbers = struct.pack(f"<{len(parts['shape'])}q", *parts["shape"])
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-len(numbers), 2)
        file.write(numbers)
    assert prod(Tensors.of(folder)[f"{MODULE}.weight_shape"].shape) == len(parts["shape"])
    return Tensors.of(folder)


def test_a_scheme_is_read_off_the_shapes(tmp_path: Path) -> None:
    assert str(packed_schemes(write(tmp_path))[MODULE]) == "int4 in groups of 128"


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": (0, 0)},
        {"shape": (8, -256)},
        {"shape": (8,)},
        {"shape": (8, 256, 1)},
        {"packed": []},
        {"packed": [8, 0]},
        {"scale": []},
        {"scale": [8, 0]},
        {"scale": [8, 512]},
    ],
)
def test_shapes_of_no_scheme(tmp_path: Path, changes: dict[str, Any]) -> None:
    tensors = write(tmp_path, **changes)
    with pytest.raises(OverrideError, match=f"checkpoint_schemes: {MODULE} of ") as refused:
        packed_schemes(tensors)
    assert len(str(refused.value).splitlines()) == 1
