"""The layouts of `ple-inference tiny --shapes real`, by arithmetic: nothing is written."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ple_inference.synthetic.layout import Spec, files
from ple_inference.synthetic.options import SyntheticOptions

sys.path.insert(0, str(Path(__file__).parents[1] / "inference_vllm"))

import released_layout

NAMES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int32: "I32",
    torch.int64: "I64",
}


def specs(**options: object) -> Iterator[Spec]:
    released = {"layers": 48, "images": True, "table_rows_base": 20_000_000}
    return (spec for file in files(SyntheticOptions(**(released | options))) for spec in file)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("quant", "form", "layers", "size_bytes", "count"),
    [
        ("none", "bf16", 48, released_layout.BF16_BYTES, 1_658),
        ("fp8", "fp8", 48, released_layout.FP8_BYTES, 152_089),
        ("int4-mixed", "int4-mixed", 4, None, None),
    ],
)
def test_it_is_the_released_layout_to_the_byte(
    quant: str, form: str, layers: int, size_bytes: int | None, count: int | None
) -> None:
    found = list(specs(quant=quant, layers=layers))
    written = {spec.name: (NAMES[spec.dtype], list(spec.shape)) for spec in found}
    assert len(written) == len(found)
    assert written == released_layout.tensors(form, layers)
    if layers == 48:
        assert (sum(spec.size_bytes for spec in found), len(found)) == (size_bytes, count)


def test_int4_experts_take_58_gib_and_words_are_dense() -> None:
    found = {spec.name: spec for spec in specs(quant="int4-mixed", images=False, layers=4)}
    experts = sum(spec.size_bytes for name, spec in found.items() if ".experts." in name)
    assert 12 * experts / 2**30 == pytest.approx(58.01, abs=0.005)
    assert found["model.layers.0.mlp.shared_expert.down_proj.weight_packed"].shape == (2560, 120)
    assert found["model.layers.3.self_attn.q_proj.weight_packed"].shape == (12_288, 480)
    assert found["model.layers.3.self_attn.q_proj.weight_scale"].shape == (12_288, 40)
    assert found["lm_head.weight_packed"].shape == (248_320, 640)
    assert found["lm_head.weight_scale"].shape == (248_320, 20)
    assert found["model.hyper_connection_mixer.input_mix_weight_down.weight_packed"].shape == (320, 2560)
    assert found["model.hyper_connection_mixer.input_mix_weight_down.weight_scale"].shape == (320, 160)


def test_refuses_options_that_make_no_model() -> None:
    for options, message in (
        ({"layers": 6}, "--layers is 6; it must be a multiple of 4"),
        ({"experts": 9}, r"--experts is 9; it must lie in \[10, 4096\]"),
        ({"seed": -1}, "--seed is -1"),
        ({"table_rows_base": 1}, "--table-rows-base is 1"),
        ({"vocab": "tiny"}, "--vocab tiny goes with --shapes tiny"),
    ):
        with pytest.raises(ValueError, match=message):
            SyntheticOptions(**options)  # type: ignore[arg-type]
