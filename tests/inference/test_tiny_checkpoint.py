"""`ple-inference tiny`: what is in the folder, and when it is written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import AutoTokenizer

from ple_inference.tiny.config import TinyOptions
from ple_inference.tiny.stamp import OutputExistsError, is_complete
from ple_inference.tiny.weights import TABLE_KEY, number_rows, row_numbers
from ple_inference.tiny.writer import write_checkpoint


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    found = {}
    for name, file in index.items():
        with safe_open(folder / file, "pt") as opened:
            found[name] = opened.get_tensor(name)
    return found


def test_default_table_is_64_mib_of_distinct_320_byte_rows(real_checkpoint: Path) -> None:
    names = [f"{TABLE_KEY}.shard_{i}.weight" for i in range(8)]
    found = tensors(real_checkpoint)
    table = torch.cat([found[name] for name in names])
    assert table.dtype == torch.bfloat16
    assert table.shape[1] * 2 == 320
    assert table.numel() * 2 >= 64 * 2**20
    assert torch.equal(row_numbers(table), torch.arange(table.shape[0]))
    raw = np.ascontiguousarray(table.view(torch.uint8).numpy()).view("V320").ravel()
    assert len(np.unique(raw)) == table.shape[0]
    assert table.float().abs().max() < 10


def test_layout_is_the_released_one(real_checkpoint: Path) -> None:
    config = json.loads((real_checkpoint / "config.json").read_text())
    text = config["text_config"]
    assert set(text["layer_types"]) == {"linear_attention", "full_attention"}
    assert "seed" not in text
    assert text["max_position_embeddings"] == 32_768
    assert text["ple_layer_ids"] == [2]
    found = tensors(real_checkpoint)
    assert found["model.language_model.layers.0.mlp.experts.gate_up_proj"].ndim == 3
    prefix = "model.language_model.layers.1.ple.ple_embedding."
    assert found[prefix + "layer_multipliers"].dtype == torch.int64
    assert found[prefix + "ngram_heads_offsets"].shape == (16,)
    assert any(name.startswith("mtp.layers.0.self_attn.indexer") for name in found)
    assert any(name.startswith("model.visual.blocks.0") for name in found)
    assert found["model.language_model.layers.1.ple.conv1d.weight"].float().abs().min() >= 0
    assert found["model.language_model.layers.1.ple.conv1d.weight"].float().std() > 0.1
    assert all(torch.isfinite(tensor.float()).all() for tensor in found.values())


def test_ids_without_text_have_no_say(real_checkpoint: Path) -> None:
    head = tensors(real_checkpoint)["lm_head.weight"].float()
    assert head[248_044:].abs().max() == 0
    assert (head[:248_044].abs().sum(-1) > 0).float().mean() > 0.9


def test_tokenizer_round_trips_and_ends_turns(real_checkpoint: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(real_checkpoint)
    text = "日本語 Привет <|im_start|>1234567<|im_end|>\r\n  x\t\t y"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer) == 248_077
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (248_046, 248_044)
    assert tokenizer.encode("<think></tool_call>") == [248_068, 248_059]


@given(st.integers(1, 40), st.integers(0, 2**31), st.sampled_from([torch.bfloat16, torch.float32]))
def test_rows_carry_their_number_and_keep_their_value(count: int, first: int, dtype: torch.dtype) -> None:
    rows = torch.randn(count, 160, generator=torch.Generator().manual_seed(first)).to(dtype)
    numbered = number_rows(rows, first)
    assert torch.equal(row_numbers(numbered), torch.arange(first, first + count))
    assert torch.allclose(numbered.float(), rows.float(), rtol=2**-6)
    assert torch.equal(numbered[:, 32:], rows[:, 32:])


def test_same_options_give_same_bytes_and_other_seeds_others(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        options = TinyOptions(vocab="tiny", seed=seed, table_rows_base=100)
        write_checkpoint(tmp_path / name, options, force=False, progress=lambda _: None)
    a, b, c = (
        {p.name: p.read_bytes() for p in (tmp_path / name).iterdir() if p.suffix == ".safetensors"}
        for name in "abc"
    )
    assert a == b
    assert all(a[name] != c[name] for name in a)


def test_refuses_what_it_did_not_make_and_leaves_nothing_half(tmp_path: Path) -> None:
    options = TinyOptions(vocab="tiny", table_rows_base=100)
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").write_text("keep")
    with pytest.raises(OutputExistsError, match="--force"):
        write_checkpoint(out, options, force=False, progress=lambda _: None)

    def fail(part: str) -> None:
        if part == "table":
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_checkpoint(out, options, force=True, progress=fail)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (out / "precious").read_text() == "keep"
    write_checkpoint(out, options, force=True, progress=lambda _: None)
    assert is_complete(out, options)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_complete_means_every_file_at_full_length(tmp_path: Path) -> None:
    options = TinyOptions(vocab="tiny", table_rows_base=100)
    out = tmp_path / "out"
    write_checkpoint(out, options, force=False, progress=lambda _: None)
    assert is_complete(out, options)
    assert not is_complete(out, TinyOptions(vocab="tiny", table_rows_base=200))
    shard = out / "model-00011-of-00011.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert not is_complete(out, options)


def test_command_says_so_and_succeeds_when_all_is_there(tiny_checkpoint: Path) -> None:
    command = [sys.executable, "-m", "ple_inference", "tiny", str(tiny_checkpoint)]
    options = ["--vocab", "tiny", "--table-rows-base", "1000"]
    done = subprocess.run(command + options, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "already complete" in done.stdout
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 1
    assert refused.stderr.count("\n") == 1
    assert "--force" in refused.stderr
