"""The tiny checkpoint's tensors: drawn by name, so that each is the same whatever else is drawn."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    Qwen4ExpConfig,
    Qwen4ExpForCausalLM,
    Qwen4ExpForConditionalGeneration,
    Qwen4ExpTextConfig,
)
from transformers.models.qwen4_exp import modeling_qwen4_exp as qwen4_exp

from ple_inference.tiny.config import TABLE_SHARDS, TinyOptions, model_config

TABLE_KEY = "model.language_model.layers.1.ple.ple_embedding.ngram_embedding"
_BITS_OF = {1: torch.int8, 2: torch.int16, 4: torch.int32}
_HASH_BUFFERS = ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")
_TABLE_STD = 0.5


def torch_dtype(options: TinyOptions) -> torch.dtype:
    return torch.bfloat16 if options.dtype == "bf16" else torch.float32


def shapes(options: TinyOptions) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every parameter, the draft module's too, in Transformers' names. Allocates nothing."""
    return parameter_shapes(model_config(options), draft=True)


def parameter_shapes(config: dict[str, Any], *, draft: bool) -> dict[str, tuple[int, ...]]:
    """The same for a config.json, of the whole model or of the text model alone."""
    with torch.device("meta"):
        model: nn.Module
        if "text_config" in config:
            whole: Any = Qwen4ExpConfig(**config)
            text = whole.text_config
            model = Qwen4ExpForConditionalGeneration(whole)  # type: ignore[no-untyped-call]
        else:
            text = Qwen4ExpTextConfig(**config)
            model = Qwen4ExpForCausalLM(text)  # type: ignore[no-untyped-call]
        extra = _DraftModule(text) if draft else nn.Module()
    named = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    return named | {f"mtp.{name}": tuple(tensor.shape) for name, tensor in extra.named_parameters()}


class _DraftModule(nn.Module):
    """Shapes of the multi-token-prediction module, in the checkpoint's names. Never run."""

    def __init__(self, text_config: Any) -> None:
        super().__init__()
        config = copy.deepcopy(text_config)
        config.num_hidden_layers = 1
        config.layer_types = ["indexed_attention"]
        config.ple_layer_ids = []
        hidden, stack = config.hidden_size, config.hidden_size * config.hc_count
        self.pre_fc_norm_embedding = qwen4_exp.Qwen4ExpTextRMSNorm(hidden)
        self.pre_fc_norm_hidden = qwen4_exp.Qwen4ExpTextRMSNorm(stack)
        self.fc_embedding = nn.Linear(hidden, hidden, bias=False)
        self.fc_hidden = nn.Linear(hidden, hidden, bias=False)
        self.layers = nn.ModuleList([qwen4_exp.Qwen4ExpTextDecoderLayer(config, 0)])
        self.hyper_connection_mixer = qwen4_exp.Qwen4ExpTextGatedResidual(config, use_combine=False)


def body_tensors(options: TinyOptions, ranks: Mapping[bytes, int]) -> Iterator[tuple[str, Tensor]]:
    """Everything but the table, hash buffers included."""
    for name, shape in shapes(options).items():
        if name == f"{TABLE_KEY}.weight":
            continue
        tensor = draw(name, shape, options.seed)
        if name == "lm_head.weight":
            _silence_unreadable(tensor, ranks)
        yield name, tensor.to(torch_dtype(options))
    yield from hash_buffers(model_config(options), TABLE_KEY.removesuffix("ngram_embedding"))


def draw(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """One f32 tensor. Transformers' own init would leave the n-gram path dead: its conv is zero there."""
    generator = _generator(name, seed)
    if name.endswith(("A_log", "dt_bias")):
        return torch.rand(shape, generator=generator) * 2 - 1
    return torch.randn(shape, generator=generator) * _std(name, shape)


def _std(name: str, shape: tuple[int, ...]) -> float:
    """Wild enough that greedy text does not fall into a short loop, tame enough to stay finite."""
    if "norm" in name:
        return 0.2
    if "conv1d" in name:
        return 0.3
    if "embed" in name:
        return 0.5
    if name == "lm_head.weight":
        return float(6 / shape[-1] ** 0.5)  # logits near 3 sigma apart: sampling has something to choose
    return float(1.5 / shape[-1] ** 0.5)


def _generator(name: str, seed: int) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))


def _silence_unreadable(head: Tensor, ranks: Mapping[bytes, int]) -> None:
    """Give logit 0, far below the best, to added and unused ids and to tokens that are parts of a character.

    A random model would otherwise end its answers, open images and write broken text at random.
    """
    readable = torch.zeros(head.shape[0], dtype=torch.bool)
    readable[[rank for token, rank in ranks.items() if _is_text(token)]] = True
    head[~readable] = 0


def _is_text(token: bytes) -> bool:
    try:
        token.decode()
    except UnicodeDecodeError:
        return False
    return True


def hash_buffers(config: dict[str, Any], prefix: str) -> Iterator[tuple[str, Tensor]]:
    """The constants of the n-gram hash of a config.json, int64, under `prefix`."""
    text: Any = (
        Qwen4ExpConfig(**config).text_config if "text_config" in config else Qwen4ExpTextConfig(**config)
    )
    # A table without columns: only its hash buffers are wanted.
    embedding = qwen4_exp.Qwen4ExpTextNGramEmbedding(text, embedding_dim=0, layer_idx=1)
    for name in _HASH_BUFFERS:
        yield prefix + name, getattr(embedding, name).clone()


def table_shards(options: TinyOptions) -> Iterator[tuple[str, Tensor]]:
    """The table in row order, cut into equal shards (the last may be shorter)."""
    rows, elements = shapes(options)[f"{TABLE_KEY}.weight"]
    per_shard = -(-rows // TABLE_SHARDS)
    for shard in range(TABLE_SHARDS):
        first = shard * per_shard
        last = min(first + per_shard, rows)
        name = f"{TABLE_KEY}.shard_{shard}.weight"
        values = torch.randn(last - first, elements, generator=_generator(name, options.seed)) * _TABLE_STD
        yield name, number_rows(values.to(torch_dtype(options)), first)


def number_rows(rows: Tensor, first: int) -> Tensor:
    """Write each row's number, counted from `first`, into the lowest mantissa bits of its first 32 elements.

    Two rows of a table therefore never have the same bytes, and no value moves by more than its last bit.
    """
    bits = rows.view(_BITS_OF[rows.itemsize]).clone()
    number = torch.arange(first, first + rows.shape[0], dtype=torch.int64)[:, None]
    digits = ((number >> torch.arange(32)) & 1).to(bits.dtype)
    bits[:, :32] = (bits[:, :32] & ~1) | digits
    return bits.view(rows.dtype)


def row_numbers(rows: Tensor) -> Tensor:
    """The inverse of `number_rows`: int64 numbers, one a row."""
    bits = rows.view(_BITS_OF[rows.itemsize])
    return ((bits[:, :32].to(torch.int64) & 1) << torch.arange(32)).sum(-1)
