"""The fields of config.json that say what a checkpoint's n-gram table must be."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ple_daemon.errors import TableRefusedError
from ple_daemon.hash_constants import HashConstants, derive, padded_rows
from ple_daemon.strict_json import read_object


@dataclass(frozen=True, slots=True)
class PleConfig:
    """What config.json says of the table. `layer` is one-indexed, as in ple_layer_ids."""

    path: Path
    constants: HashConstants
    vocab_size: int
    row_elements: int
    rows: int
    layer: int
    parts: int | None
    dtype: str | None


def read_config(path: Path) -> PleConfig:
    """Reads what concerns the table; missing fields take the defaults of transformers' config class."""
    whole = read_object(path)
    text = whole.get("text_config", whole)
    if not isinstance(text, dict):
        raise TableRefusedError(f"{path}: text_config is not an object")
    layers = text.get("ple_layer_ids") or []
    if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
        raise TableRefusedError(
            f"{path}: bad PLE config: ple_layer_ids is no list of numbers: {layers!r:.100}"
        )
    layers = sorted(set(layers))
    if not layers:
        raise TableRefusedError(
            f"{path}: no PLE layer (ple_layer_ids is empty): this model has no n-gram table"
        )
    if len(layers) > 1:
        raise TableRefusedError(f"{path}: {len(layers)} PLE layers {layers}; exactly one is supported")
    try:
        return _ple_config(path, whole, text, int(layers[0]))
    except (KeyError, TypeError, ValueError, IndexError, ArithmeticError) as error:
        raise TableRefusedError(f"{path}: bad PLE config: {type(error).__name__}: {error}") from error


def _ple_config(path: Path, whole: dict[str, Any], text: dict[str, Any], layer: int) -> PleConfig:
    eos = text["eos_token_id"]
    constants = derive(
        vocab_size=_bounded("vocab_size", text["vocab_size"], 1, 2**31 - 1),
        eos_token_id=_bounded("eos_token_id", eos[0] if isinstance(eos, list) else eos, -(2**31), 2**31 - 1),
        ngram_size=_bounded("ngram_size", text.get("ngram_size", 3), 2, 8),
        heads_per_ngram=_bounded("heads_per_ngram", text.get("heads_per_ngram", 8), 1, 256),
        ngram_vocab_size_base=_bounded(
            "ngram_vocab_size_base", text.get("ngram_vocab_size_base", 20_000_000), 1, 2**40
        ),
        seed=int(text.get("seed", 1234)),
    )
    width = int(text.get("ple_embed_dim") or text["hidden_size"])
    if constants.heads <= 0 or width <= 0 or width % constants.heads:
        raise ValueError(f"ple_embed_dim {width} is not a multiple of {constants.heads} heads")
    parts = text.get("split_ngram_parts")
    dtype = text.get("dtype") or text.get("torch_dtype") or whole.get("dtype") or whole.get("torch_dtype")
    return PleConfig(
        path=path,
        constants=constants,
        vocab_size=int(text["vocab_size"]),
        row_elements=width // constants.heads,
        rows=padded_rows(constants.used_rows, int(text.get("make_ngram_vocab_size_divisible_by", 128))),
        layer=layer,
        parts=None if parts is None else int(parts),
        dtype=None if dtype is None else str(dtype).removeprefix("torch."),
    )


def _bounded(name: str, value: Any, low: int, high: int) -> int:
    """Keep the search for primes from taking for ever. Raises ValueError or TypeError."""
    number = int(value)
    if not low <= number <= high:
        raise ValueError(f"{name} is {number}, not from {low} to {high}")
    return number
