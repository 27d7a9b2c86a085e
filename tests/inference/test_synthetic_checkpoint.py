"""`ple-inference tiny --quant`: the released layouts, decoded again."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import Qwen4ExpForCausalLM

from ple_inference.quantized.dequantize import dequantize, dequantize_blocks, dequantize_rows
from ple_inference.quantized.scheme import PACKED, SCALE, SHAPE, scheme_of
from ple_inference.synthetic.layout import files
from ple_inference.synthetic.options import SyntheticOptions
from ple_inference.synthetic.writer import write_checkpoint

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))

import dequantized_model

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
    for name, packed in int4.items():
        if not name.endswith(PACKED):
            continue
        module = name.removesuffix(PACKED)
        scheme = scheme_of(module)
        assert scheme is not None
        rows, columns = int4[module + SHAPE].tolist()
        assert int4[module + SCALE].dtype == torch.float16
        weight = dequantize(packed, int4[module + SCALE], scheme, (rows, columns))
        std = 1.0 if "embed_tokens" in name else 1.2 / columns**0.5
        assert weight.std() == pytest.approx(std, rel=0.1), name
        assert abs(weight.mean()) < 0.1 * std
        seen.add(scheme)
    assert len(seen) == 4


@pytest.mark.parametrize("quant", ["int4-mixed", "fp8", "none"])
def test_the_gpu_reference_is_the_model_of_a_decoded_copy(tmp_path: Path, quant: str) -> None:
    """`dequantized_model` on the CPU against from_pretrained of a bf16 checkpoint decoded here."""
    folder = make(tmp_path / "quantized", quant=quant)
    stored = tensors(folder)
    copy = tmp_path / "copy"
    copy.mkdir()
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config", None)
    (copy / "config.json").write_text(json.dumps(config))
    save_file(decoded(stored), copy / "model.safetensors", metadata={"format": "pt"})
    expected, info = Qwen4ExpForCausalLM.from_pretrained(copy, dtype=torch.bfloat16, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    found = dequantized_model.load(folder, "cpu")
    theirs, ours = expected.state_dict(), found.state_dict()
    assert theirs.keys() == ours.keys()
    for name, tensor in theirs.items():
        assert tensor.dtype == ours[name].dtype, name
        assert torch.equal(tensor, ours[name]), name
    with torch.no_grad():
        ids = torch.randint(0, 500, (1, 30), generator=torch.Generator().manual_seed(1))
        assert torch.equal(expected.eval()(ids).logits, found(ids).logits)
        assert torch.isfinite(found(ids).logits).all()


def decoded(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same model in bf16 under Transformers' names for single experts."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in stored.items():
        module = name.rpartition(".")[0]
        if name.endswith(PACKED):
            scheme = scheme_of(module)
            assert scheme is not None
            shape = tuple(stored[module + SHAPE].tolist())
            weight = dequantize(tensor, stored[module + SCALE], scheme, shape, torch.bfloat16)
            found[f"{module}.weight"] = weight
        elif f"{name}_scale_inv" in stored:
            found[name] = dequantize_blocks(tensor, stored[f"{name}_scale_inv"], torch.bfloat16)
        elif tensor.dtype == torch.float8_e4m3fn:
            scale = stored[f"{module.rpartition('.')[0]}.weight_scale"]
            found[name] = dequantize_rows(tensor, scale)
        elif not name.endswith((SCALE, SHAPE, "weight_scale_inv")):
            found[name] = tensor
    return joined_table(found)


def joined_table(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    table = "model.layers.1.ple.ple_embedding.ngram_embedding"
    shards = [found.pop(f"{table}.shard_{shard}.weight") for shard in range(8)]
    return found | {f"{table}.weight": torch.cat(shards)}
