"""Which checkpoints are read, and the one line that each bad one is refused with."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from ple_checkpoint import PREFIX, Checkpoint, Tensors, write_index, write_safetensors

from ple_daemon.errors import TableRefusedError
from ple_daemon.source import open_table, read_layout
from ple_daemon.table_format import RowType

SCALE = PREFIX + "ngram_embedding.weight_scale"
SHARD_1 = PREFIX + "ngram_embedding.shard_1.weight"


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("shards", [1, 4, 12])
@pytest.mark.parametrize("dtype", ["BF16", "F8_E4M3", "F32"])
def test_every_row_of_every_layout(dtype: str, shards: int, files: int, tmp_path: Path) -> None:
    """d16: one single tensor is a table as well."""
    made = Checkpoint(dtype=dtype, shards=shards, files=files)
    with open_table(made.write(tmp_path)) as table:
        assert table.layout.row_bytes == made.row_bytes
        assert np.array_equal(table.lookup(np.arange(made.rows)).reshape(made.rows, -1), made.table())


def test_flat_config_and_class_defaults(tmp_path: Path) -> None:
    """d02: the seed is absent, as in the released config, and not 0."""
    folder = Checkpoint().write(tmp_path)
    config = json.loads((folder / "config.json").read_text())["text_config"]
    for name in ("ngram_size", "heads_per_ngram", "make_ngram_vocab_size_divisible_by", "split_ngram_parts"):
        del config[name]  # "seed" is absent as in the released config
    config["eos_token_id"] = [500, 7]
    (folder / "config.json").write_text(json.dumps(config))
    assert read_layout(folder).constants == Checkpoint().constants


def test_fp8_scale_is_kept_as_stored(tmp_path: Path) -> None:
    layout = read_layout(Checkpoint(dtype="F8_E4M3").write(tmp_path))
    assert layout.row_type is RowType.FP8_E4M3
    assert (layout.scale_bits, len(layout.scale)) == (0x3951, 2)


def replaced(name: str, dtype: str, shape: list[int], raw: bytes) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__setitem__(name, (dtype, shape, raw))


def cut_shard(tensors: Tensors) -> None:
    dtype, (rows, width), raw = tensors[SHARD_1]
    tensors[SHARD_1] = (dtype, [rows - 1, width], raw[: -2 * width])


def lengthen_shard(tensors: Tensors) -> None:
    dtype, (rows, width), raw = tensors[SHARD_1]
    tensors[SHARD_1] = (dtype, [rows + 1, width], raw + bytes(2 * width))


def narrow_shard(tensors: Tensors) -> None:
    dtype, (rows, width), raw = tensors[SHARD_1]
    tensors[SHARD_1] = (dtype, [rows * 2, width // 2], raw)


def rename_shard(new: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__setitem__(SHARD_1.replace("shard_1", new), tensors.pop(SHARD_1))


def change_constant(name: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        dtype, shape, raw = tensors[PREFIX + name]
        tensors[PREFIX + name] = (dtype, shape, bytes([raw[0] ^ 1]) + raw[1:])

    return change


BAD_TENSORS = {
    "missing shard": (lambda t: t.pop(SHARD_1), "missing shard 1 of 4"),
    "gap in numbers": (rename_shard("shard_4"), "missing shard 1 of 4"),
    "one too many": (
        lambda t: t.__setitem__(SHARD_1.replace("_1", "_4"), t[SHARD_1]),
        "shard_4.weight is one too many",
    ),
    "duplicate number": (
        lambda t: t.__setitem__(SHARD_1.replace("_1", "_01"), t[SHARD_1]),
        "duplicate shard 1",
    ),
    "whole and in shards": (
        lambda t: t.__setitem__(PREFIX + "ngram_embedding.weight", t[SHARD_1]),
        "both whole and in shards",
    ),
    "short shard": (cut_shard, "short shard: .*shard_1.weight has"),
    "long shard": (lengthen_shard, "long shard: .*shard_1.weight has"),
    "wrong width": (narrow_shard, r"shape \[\d+, 5\], config.json says rows of 10 elements"),
    "mixed types": (
        lambda t: t.__setitem__(SHARD_1, ("F16", *t[SHARD_1][1:])),
        "shard_1.weight is F16, .*shard_0.weight is BF16",
    ),
    "altered multiplier": (change_constant("layer_multipliers"), "layer_multipliers differ"),
    "altered size": (change_constant("ngram_heads_vocab_sizes"), "ngram_heads_vocab_sizes differ"),
    "altered offset": (change_constant("ngram_heads_offsets"), "ngram_heads_offsets differ"),
    "scale on bf16": (replaced(SCALE, "BF16", [1], b"\x51\x39"), "weight_scale beside bf16"),
    "no table": (
        lambda t: [t.pop(name) for name in list(t) if "ngram_embedding" in name],
        "came without its n-gram table",
    ),
}


@pytest.mark.parametrize(("change", "reason"), BAD_TENSORS.values(), ids=BAD_TENSORS)
def test_bad_tensors_are_refused(change: Callable[[Tensors], None], reason: str, tmp_path: Path) -> None:
    """d02: a changed multiplier. d15: a shard missing or there twice, a checkpoint without its table."""
    made = Checkpoint()
    tensors = made.tensors()
    change(tensors)
    refused(made.write(tmp_path, tensors), reason)


@pytest.mark.parametrize(
    ("dtype", "raw", "reason"),
    [
        ("BF16", b"\0\0", "is 0.0, no usable scale"),
        ("BF16", b"\xc0\x7f", "is nan, no usable scale"),
        ("BF16", b"\x80\x7f", "is inf, no usable scale"),
        ("BF16", b"\x51\xb9", "is -0.0001993.*, no usable scale"),
        ("F32", np.float32(1e30).tobytes(), "no usable scale"),
        ("BF16", b"\x51\x39\x51\x39", "must be one BF16 or F32"),
        ("F16", b"\x51\x39", "must be one BF16 or F32"),
    ],
)
def test_d13_bad_scales_are_refused(dtype: str, raw: bytes, reason: str, tmp_path: Path) -> None:
    made = Checkpoint(dtype="F8_E4M3")
    tensors = made.tensors() | {SCALE: (dtype, [len(raw) // (4 if dtype == "F32" else 2)], raw)}
    refused(made.write(tmp_path, tensors), reason)


def test_d13_a_missing_scale_is_refused(tmp_path: Path) -> None:
    made = Checkpoint(dtype="F8_E4M3")
    tensors = made.tensors()
    del tensors[SCALE]
    refused(made.write(tmp_path, tensors), "without its ngram_embedding.weight_scale")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"ple_layer_ids": []}, "no PLE layer"),
        ({"ple_layer_ids": None}, "no PLE layer"),
        ({"ple_layer_ids": [2, 5]}, r"2 PLE layers \[2, 5\]; exactly one is supported"),
        ({"ple_layer_ids": [3]}, r"decoder layers \[1\], config.json says 2"),
        ({"dtype": "float32"}, "is BF16, config.json says float32"),
        ({"dtype": "float16"}, "is BF16, config.json says float16"),
        ({"ple_embed_dim": 320}, "config.json says rows of 20 elements"),
        ({"ple_embed_dim": 161}, "not a multiple of 16 heads"),
        ({"seed": 0}, "layer_multipliers differ"),
        ({"vocab_size": 513}, "layer_multipliers differ"),
        ({"split_ngram_parts": 5}, "missing shard 4 of 5"),
        ({"ngram_vocab_size_base": 300}, "short shard"),
        ({"eos_token_id": None}, "bad PLE config: KeyError: 'eos_token_id'"),
        ({"vocab_size": "many"}, "bad PLE config: ValueError"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"ple_layer_ids": 2}, "ple_layer_ids is no list of numbers"),
        ({"ple_layer_ids": [[2]]}, "ple_layer_ids is no list of numbers"),
        ({"ple_layer_ids": [2, "a"]}, "ple_layer_ids is no list of numbers"),
        ({"ngram_size": 0}, "ngram_size is 0, not from 2 to 8"),
        ({"heads_per_ngram": 10**7}, "heads_per_ngram is 10000000"),
        ({"ngram_vocab_size_base": 10**18}, "ngram_vocab_size_base is 1000000000000000000"),
    ],
)
def test_bad_configs_are_refused(changes: dict[str, object], reason: str, tmp_path: Path) -> None:
    refused(Checkpoint(config_changes=changes).write(tmp_path), reason)


def file_2(folder: Path) -> Path:
    return folder / "model-00002-of-00003.safetensors"


def with_header(raw: bytes, data: bytes = b"") -> bytes:
    return len(raw).to_bytes(8, "little") + raw + data


BAD_FILES = {
    "no such folder": (lambda f: f.rename(f.with_name("elsewhere")), "does not exist"),
    "no config": (lambda f: (f / "config.json").unlink(), "not a checkpoint: it has no config.json"),
    "config is no JSON": (lambda f: (f / "config.json").write_text("{"), "config.json: not JSON"),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), "not a JSON object"),
    "no weights": (lambda f: (f / "model.safetensors.index.json").unlink(), "not a checkpoint: neither"),
    "empty index": (lambda f: write_index(f, {}), "has no weight_map"),
    "file missing": (lambda f: file_2(f).unlink(), "names model-00002-of-00003.safetensors, which does not"),
    "path in index": (lambda f: write_index(f, {"a": "../a.safetensors"}), "no plain file name"),
    "tensor not there": (
        lambda f: write_index(f, {SHARD_1: "model-00001-of-00003.safetensors"}),
        "lacks .*shard_1.weight",
    ),
    "name twice in index": (
        lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b", "a": "c"}}'),
        "duplicate: names a twice",
    ),
    "tensor in two files": (
        lambda f: write_safetensors(
            f / "model-00003-of-00003.safetensors",
            {**Checkpoint().tensors(), "x": ("U8", [1], b"x")},
        ),
        "duplicate of",
    ),
    "truncated": (
        lambda f: file_2(f).write_bytes(file_2(f).read_bytes()[:-1]),
        "model-00002-of-00003.safetensors: truncated",
    ),
    "longer than its header says": (
        lambda f: file_2(f).write_bytes(file_2(f).read_bytes() + b"x"),
        "model-00002-of-00003.safetensors: too long",
    ),
    "empty file": (lambda f: file_2(f).write_bytes(b""), "malformed safetensors file"),
    "header beyond the file": (
        lambda f: file_2(f).write_bytes((1 << 40).to_bytes(8, "little")),
        "does not fit",
    ),
    "header is no JSON": (lambda f: file_2(f).write_bytes(with_header(b"\xff\xfe")), "not JSON"),
    "header is a list": (lambda f: file_2(f).write_bytes(with_header(b"[]")), "not a JSON object"),
    "entry without offsets": (
        lambda f: file_2(f).write_bytes(with_header(b'{"a": {"dtype": "U8"}}')),
        "entry of a lacks",
    ),
    "negative offsets": (
        lambda f: file_2(f).write_bytes(
            with_header(b'{"a": {"dtype": "U8", "shape": [1], "data_offsets": [-1, 0]}}')
        ),
        "no sizes",
    ),
    "offsets that do not fit the shape": (
        lambda f: file_2(f).write_bytes(
            with_header(b'{"a": {"dtype": "BF16", "shape": [1], "data_offsets": [0, 1]}}', b"x")
        ),
        r"BF16\[1\] but its offsets span 1",
    ),
}


@pytest.mark.parametrize(("change", "reason"), BAD_FILES.values(), ids=BAD_FILES)
def test_bad_files_are_refused(change: Callable[[Path], None], reason: str, tmp_path: Path) -> None:
    folder = Checkpoint().write(tmp_path / "checkpoint")
    change(folder)
    refused(folder, reason)


def test_d15_two_files_that_changed_places_are_refused(tmp_path: Path) -> None:
    folder = Checkpoint().write(tmp_path)
    one, two, other = file_2(folder), folder / "model-00003-of-00003.safetensors", folder / "x"
    one.rename(other)
    two.rename(one)
    other.rename(two)
    refused(folder, r"model-0000[23]-of-00003\.safetensors: lacks ")


def refused(folder: Path, reason: str) -> None:
    with pytest.raises(TableRefusedError) as refusal:
        read_layout(folder)
    text = str(refusal.value)
    assert re.search(reason, text), text
    assert "\n" not in text
    assert str(folder) in text
