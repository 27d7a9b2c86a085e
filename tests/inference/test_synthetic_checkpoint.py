"""`ple-inference tiny --quant`: the released layouts, decoded again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from ple_inference.quantized.dequantize import dequantize
from ple_inference.quantized.scheme import PACKED, SCALE, SHAPE, scheme_of
from ple_inference.synthetic.layout import files
from ple_inference.synthetic.options import SyntheticOptions
from ple_inference.synthetic.writer import write_checkpoint

torch.set_num_threads(1)
SMALL = {"shapes": "tiny", "layers": 4, "experts": 6, "table_rows_base": 100, "vocab": "tiny"}


def make(out: Path, **options: object) -> Path:
    chosen = SyntheticOptions(**(SMALL | options))  # type: ignore[arg-type]
    write_checkpoint(out, chosen, files(chosen), force=False, progress=lambda _: None)
    return out


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    found: dict[str, torch.Tensor] = {}
    for file in sorted(set(index.values())):
        with safe_open(folder / file, "pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    assert set(found) == set(index)
    return found


@pytest.fixture(scope="module")
def int4(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return tensors(make(tmp_path_factory.mktemp("int4") / "out", quant="int4-mixed"))


def test_packed_weights_have_the_size_and_the_spread_that_the_layout_demands(
    int4: dict[str, torch.Tensor],
) -> None:
    seen = set()
    for name in int4:
        if not name.endswith(PACKED):
            continue
        module = name.removesuffix(PACKED)
        scheme = scheme_of(module)
        assert scheme is not None
        rows, columns = int4[module + SHAPE].tolist()
        assert int4[module + SCALE].dtype == torch.float16
        weight = dequantize(int4[name], int4[module + SCALE], scheme, (rows, columns))
        std = 1.0 if "embed_tokens" in name else 1.2 / columns**0.5
        assert weight.std() == pytest.approx(std, rel=0.1), name
        assert abs(weight.mean()) < 0.1 * std
        seen.add(scheme)
    assert len(seen) == 4
