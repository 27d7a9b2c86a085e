"""What must be true of a checkpoint folder before anything heavy is loaded."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class CheckpointError(Exception):
    """A folder that cannot be served; one line that says why."""


@dataclass(frozen=True)
class Checkpoint:
    """A Qwen4Exp checkpoint with one n-gram layer."""

    path: Path
    config: dict[str, Any]
    generation: dict[str, Any]

    @property
    def text(self) -> dict[str, Any]:
        """The text model's config; of a checkpoint without a vision tower it is the whole config."""
        return dict(self.config.get("text_config", self.config))

    @property
    def max_positions(self) -> int:
        return int(self.text["max_position_embeddings"])

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end an answer."""
        ids = self.generation.get("eos_token_id", self.text["eos_token_id"])
        return frozenset(ids if isinstance(ids, list) else [ids])


def read_checkpoint(path: Path, *, text_only: bool = False) -> Checkpoint:
    """Read the JSON files and check them. Raises CheckpointError.

    `text_only`: whether one without a vision tower (qwen4_exp_text) will do as well.
    """
    if not path.is_dir():
        raise CheckpointError(f"no such model folder: {path}")
    config = read_json(path / "config.json")
    model_type = config.get("model_type")
    whole = model_type == "qwen4_exp" and isinstance(config.get("text_config"), dict)
    text_alone = model_type == "qwen4_exp_text" and "text_config" not in config
    if text_alone and not text_only:
        raise CheckpointError(
            f"{path} is the text model alone ({model_type}): the reference engine serves whole checkpoints "
            "in bf16 or f32, as `ple-inference tiny` makes them without --quant and --shapes"
        )
    if not whole and not text_alone:
        raise CheckpointError(f"{path} is not a Qwen4Exp checkpoint: model_type {model_type!r}")
    layers = config.get("text_config", config).get("ple_layer_ids") or []
    if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
        raise CheckpointError(f"{path}: ple_layer_ids is no list of numbers")
    if len(layers) != 1:
        raise CheckpointError(f"{path} has {len(layers)} n-gram (PLE) layers; exactly one is served")
    for name in ("model.safetensors.index.json", *(("tokenizer.json",) if whole else ())):
        if not (path / name).is_file():
            raise CheckpointError(f"{path} has no {name}")
    generation_path = path / "generation_config.json"
    generation = read_json(generation_path) if generation_path.exists() else {}
    return Checkpoint(path, config, generation)


def refuse_quantized(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError for weights that only the vLLM engine can compute with."""
    quantization = checkpoint.config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise CheckpointError(
            f"{checkpoint.path} is quantized ({method}); the reference engine computes with bf16 or f32 "
            "weights: serve it with --engine vllm"
        )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises CheckpointError."""
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path} is no file")
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return content
