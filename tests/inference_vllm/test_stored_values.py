"""Values that the headers do not tell: scales and shapes, of checkpoints that `ple-inference tiny` makes."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from refused_case import Case

from ple_inference.synthetic.layout import files
from ple_inference.synthetic.options import Quant, SyntheticOptions
from ple_inference.synthetic.writer import write_checkpoint
from ple_inference.vllm_engine import preflight
from ple_inference.vllm_engine.tensors import Tensors

torch.set_num_threads(1)
TEXT = "model.language_model."
EXPERT = f"{TEXT}layers.2.mlp.experts.1.up_proj"
TABLE = f"{TEXT}layers.1.ple.ple_embedding.ngram_embedding.weight_scale"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Quant], Path]:
    """A checkpoint of each layout, written once."""
    folder = tmp_path_factory.mktemp("made")

    def make(quant: Quant) -> Path:
        out = folder / quant
        if not out.exists():
            options = SyntheticOptions(quant, "tiny", 4, 4, 60, "tiny", images=True)
            write_checkpoint(out, options, files(options), force=False, progress=lambda _: None)
        return out

    return make


@pytest.fixture
def reached(case: Case, monkeypatch: pytest.MonkeyPatch) -> Case:
    """A case whose `serve` gets as far as the scales, without vLLM and whatever else runs here."""
    monkeypatch.setattr(preflight, "_check_plugin", lambda launch: None)
    monkeypatch.setattr(preflight, "_check_port", lambda address: None)
    return case


def overwrite(case: Case, name: str, content: bytes, at_bytes: int = 0) -> None:
    tensor = Tensors.of(case.folder)[name]
    with tensor.file.open("r+b") as file:
        file.seek(tensor.offset_bytes + at_bytes)
        file.write(content)


def fill(case: Case, name: str, item: bytes) -> None:
    overwrite(case, name, item * (Tensors.of(case.folder)[name].size_bytes // len(item)))


@pytest.mark.parametrize(
    ("quant", "name", "item"),
    [
        ("int4-mixed", f"{EXPERT}.weight_scale", struct.pack("<e", float("nan"))),
        ("int4-mixed", f"{EXPERT}.weight_scale", struct.pack("<e", float("inf"))),
        ("int4-mixed", f"{TEXT}embed_tokens.weight_scale", struct.pack("<e", -float("inf"))),
        ("int4-mixed", "lm_head.weight_scale", struct.pack("<e", float("nan"))),
        ("fp8", f"{EXPERT}.weight_scale_inv", b"\xc0\x7f"),
        ("fp8", f"{EXPERT}.weight_scale_inv", b"\x80\xff"),
        ("fp8", TABLE, b"\xc0\x7f"),
    ],
)
def test_a_scale_that_is_no_number(reached: Case, made, quant: Quant, name: str, item: bytes) -> None:
    shutil.copytree(made(quant), reached.folder)
    last = Tensors.of(reached.folder)[name].size_bytes - len(item)
    overwrite(reached, name, item, last)
    line = reached.refusal()
    assert f".safetensors: {name} holds what is infinite or no number; download it again" in line


@pytest.mark.parametrize(
    ("quant", "name", "item"),
    [
        ("int4-mixed", f"{EXPERT}.weight_scale", b"\0\0"),
        ("int4-mixed", f"{TEXT}layers.3.self_attn.q_proj.weight_scale", b"\0\x80"),
        ("fp8", f"{EXPERT}.weight_scale_inv", b"\0\0"),
        ("fp8", TABLE, b"\0\0"),
    ],
)
def test_a_scale_of_zeros(reached: Case, made, quant: Quant, name: str, item: bytes) -> None:
    shutil.copytree(made(quant), reached.folder)
    fill(reached, name, item)
    assert f"{name} is nothing but zeros: it was never written; download it again" in reached.refusal()


def test_single_zeros_are_scales_of_weights_that_are_zero(reached: Case, made) -> None:
    shutil.copytree(made("int4-mixed"), reached.folder)
    overwrite(reached, f"{EXPERT}.weight_scale", b"\0\0")
    reached.succeed("plan")


@pytest.mark.parametrize("shape", [(128, 256), (0, 0), (-128, -128), (2**62, 2)])
def test_packed_weights_that_say_another_shape(reached: Case, made, shape: tuple[int, int]) -> None:
    shutil.copytree(made("int4-mixed"), reached.folder)
    overwrite(reached, f"{EXPERT}.weight_shape", struct.pack("<2q", *shape))
    assert f"{EXPERT}.weight_shape says {list(shape)}, the config wants [128, 128]" in reached.refusal()


@pytest.mark.parametrize("form", ["int4-mixed", "fp8"])
def test_headers_are_enough_to_plan_with_and_not_to_serve(reached: Case, form: Quant) -> None:
    """A download that set the size first and then broke off looks the same."""
    reached.write(form)
    reached.succeed("plan")
    line = reached.run_refused("serve", "--engine", "vllm")
    assert "it was never written" in line or "_shape says [0, 0]" in line


def test_values_of_another_file_are_read_where_they_are(reached: Case, made) -> None:
    """Whole checkpoints pass, of both layouts."""
    for quant in ("int4-mixed", "fp8"):
        shutil.copytree(made(quant), reached.folder)
        reached.succeed("plan")
        shutil.rmtree(reached.folder)
