"""Makes small checkpoints with numpy alone: only the PLE part, in the released names, all rows distinct."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ple_daemon.hash_constants import HashConstants, derive, padded_rows

PREFIX = "model.language_model.layers.1.ple.ple_embedding."
ELEMENT_BYTES = {"BF16": 2, "F8_E4M3": 1, "F32": 4}
CONFIG_DTYPE = {"BF16": "bfloat16", "F8_E4M3": "bfloat16", "F32": "float32"}
FP8_SCALE = bytes.fromhex("5139")

Tensors = dict[str, tuple[str, list[int], bytes]]


@dataclass
class Checkpoint:
    """What to write. Change fields or `tensors()` before `write` to make a bad one."""

    dtype: str = "BF16"
    shards: int = 4
    files: int = 3
    width: int = 10
    base: int = 200
    seed: int = 7
    config_changes: dict[str, Any] = field(default_factory=dict)

    @property
    def constants(self) -> HashConstants:
        return derive(vocab_size=512, eos_token_id=500, ngram_vocab_size_base=self.base)

    @property
    def rows(self) -> int:
        return padded_rows(self.constants.used_rows, 128)

    @property
    def row_bytes(self) -> int:
        return self.width * ELEMENT_BYTES[self.dtype]

    def table(self) -> np.ndarray:
        """uint8 [rows, row_bytes]; every row carries its number, so no two are equal."""
        rng = np.random.default_rng(self.seed)
        table = rng.integers(0, 256, (self.rows, self.row_bytes), np.uint8)
        table[:, :4] = np.arange(self.rows, dtype="<u4").view(np.uint8).reshape(-1, 4)
        return table

    def config(self) -> dict[str, Any]:
        text = {
            "vocab_size": 512, "hidden_size": self.width * 16, "ple_embed_dim": self.width * 16,
            "eos_token_id": 500, "ngram_size": 3, "heads_per_ngram": 8, "ngram_vocab_size_base": self.base,
            "make_ngram_vocab_size_divisible_by": 128, "ple_layer_ids": [2], "split_ngram_parts": self.shards,
            "dtype": CONFIG_DTYPE[self.dtype],
        }  # fmt: skip
        text.update(self.config_changes)
        text = {name: value for name, value in text.items() if value is not None}
        return {"model_type": "qwen4_exp", "text_config": text}

    def tensors(self) -> Tensors:
        """Every tensor by name, table shards in order of their numbers."""
        step = -(-self.rows // self.shards)
        table, made = self.table(), {}
        for number in range(self.shards):
            part = table[number * step : (number + 1) * step]
            name = f"ngram_embedding.shard_{number}.weight" if self.shards > 1 else "ngram_embedding.weight"
            made[PREFIX + name] = (self.dtype, [len(part), self.width], part.tobytes())
        for name, values in (
            ("layer_multipliers", self.constants.multipliers),
            ("ngram_heads_vocab_sizes", self.constants.head_sizes),
            ("ngram_heads_offsets", self.constants.head_offsets),
        ):
            made[PREFIX + name] = ("I64", [len(values)], np.array(values, "<i8").tobytes())
        if self.dtype == "F8_E4M3":
            made[PREFIX + "ngram_embedding.weight_scale"] = ("BF16", [1], FP8_SCALE)
        made["lm_head.weight"] = ("BF16", [3, 5], bytes(30))
        return made

    def write(self, folder: Path, tensors: Tensors | None = None) -> Path:
        """Spread the tensors over `files` files (one: no index) and write config.json."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config()))
        tensors = self.tensors() if tensors is None else tensors
        if self.files == 1:
            write_safetensors(folder / "model.safetensors", tensors)
            return folder
        weight_map = {}
        for index in range(self.files):
            name = f"model-{index + 1:05}-of-{self.files:05}.safetensors"
            part = dict(list(tensors.items())[index :: self.files])
            write_safetensors(folder / name, part)
            weight_map.update(dict.fromkeys(part, name))
        write_index(folder, weight_map)
        return folder


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def write_safetensors(path: Path, tensors: Tensors) -> None:
    header, at = {}, 0
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(raw)]}
        at += len(raw)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(raw for *_, raw in tensors.values()))
