"""vLLM's n-gram embedding without its table: rows come into a buffer while the forward's first layer runs.

CUDA graphs read the buffer at a fixed address, and so does an eager one. Nothing here talks to the daemon.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
from vllm.models.qwen4_exp.common.ngram_embedding import Qwen4ExpPLEPinnedHostEmbedding
from vllm.models.qwen4_exp.nvidia import ple_layer
from vllm.models.qwen4_exp.nvidia.ngram_embedding import Qwen4ExpNGramEmbedding

_REPLACED = Qwen4ExpPLEPinnedHostEmbedding.__name__


def install() -> None:
    # vLLM makes the registered subclass wherever it makes the class of this name.
    if op_registry_oot.get(_REPLACED) is not DaemonPLEEmbedding:
        PluggableLayer.register_oot(DaemonPLEEmbedding, name=_REPLACED)
    ple_layer.Qwen4ExpNGramEmbedding = DaemonNGramEmbedding


def is_live() -> bool:
    return (
        op_registry_oot.get(_REPLACED) is DaemonPLEEmbedding
        and ple_layer.Qwen4ExpNGramEmbedding is DaemonNGramEmbedding
    )


class DaemonPLEEmbedding(Qwen4ExpPLEPinnedHostEmbedding):
    """Rows of the step's tokens, as the daemon stores them, at a fixed address on the GPU."""

    def __init__(self, *args: Any, max_total_tokens: int, num_ngram_heads: int, **kwargs: Any) -> None:
        super().__init__(*args, max_total_tokens=max_total_tokens, num_ngram_heads=num_ngram_heads, **kwargs)
        dtype = self.embedding_method.lookup_dtype(self)
        row_bytes = num_ngram_heads * self.embedding_dim * dtype.itemsize
        # Rows of padding tokens are read too, and thrown away: they must not be NaN.
        self.row_bytes = torch.zeros(
            max_total_tokens, row_bytes, dtype=torch.uint8, device=self._uva_weight.device
        )
        """uint8 [max_total_tokens, heads * bytes of a row]."""
        self._rows = self.row_bytes.view(dtype)
        # External: a graph that is captured waits for what was recorded before each of its launches.
        self.rows_there = torch.cuda.Event(external=True)
        self.rows_there.record()  # PyTorch makes the event now; a wait for one that is not made is no wait
        """Recorded when a step's rows are in `row_bytes`; the layer before the table's runs until then."""

    def allocate_embedding_weight(
        self, num_embeddings: int, embedding_dim: int, dtype: torch.dtype
    ) -> Tensor:
        """One row for the callers that ask a table for its type and place; it is never read."""
        del num_embeddings
        row = torch.zeros(1, embedding_dim * dtype.itemsize, dtype=torch.uint8, device="cpu", pin_memory=True)
        return row.view(dtype)

    def start_prefetch(self, ngram_ids: Tensor) -> None:
        """The rows are on their way already."""

    def finalize_prefetch(self, total_tokens: int) -> Tensor:
        """[total_tokens, heads * elements of a row], a view of the buffer once the step's rows are there."""
        self.rows_there.wait()
        return self._rows[:total_tokens]


class DaemonNGramEmbedding(Qwen4ExpNGramEmbedding):
    """Computes row ids before the forward instead of within it, and loads no table."""

    ngram_embedding: DaemonPLEEmbedding

    def start_prefetch(self, input_ids: Tensor, query_start_loc: Tensor, ngram_context: Tensor) -> None:
        """Ids were computed, and rows fetched, by `TriplexModelState.prepare_inputs`."""

    def row_ids(self, input_ids: Tensor, query_start_loc: Tensor, ngram_context: Tensor) -> Tensor:
        """int32 [tokens] -> int64 [tokens, heads], by vLLM's own kernel, in a buffer of fixed address."""
        return self.compute_ngram_ids(
            input_ids, query_start_loc, ngram_context, output=self._prefetch_ids[: input_ids.numel()]
        )

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Take hash constants and scale. Rows are passed over: a safetensors file is mapped, not read."""
        loaded = super().load_weights((name, weight) for name, weight in weights if not _holds_rows(name))
        return loaded | {"ngram_embedding.weight"}


def _holds_rows(name: str) -> bool:
    """The table in one tensor or in shards, and not its scale."""
    first, _, last = name.rpartition(".")
    return last == "weight" and first.startswith("ngram_embedding")
