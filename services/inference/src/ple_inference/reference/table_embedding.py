"""The model's n-gram embedding without its table: rows come from the daemon."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ple_inference.table_check import NgramConstants
from ple_rpc.table.v1 import table_pb2

# Transformers keeps the ids before the newest token as one more "conv state" of the layer's cache.
_CONTEXT_STATE = 2

_STORED = {
    table_pb2.ROW_TYPE_BF16: torch.bfloat16,
    table_pb2.ROW_TYPE_FP8_E4M3: torch.float8_e4m3fn,
    table_pb2.ROW_TYPE_F32: torch.float32,
}


class RowSource(Protocol):
    """What `TableEmbedding` asks of `ple_rpc.client.TableClient`."""

    @property
    def description(self) -> table_pb2.TableDescription: ...

    def lookup_tokens(
        self,
        tokens: Sequence[int],
        context: Sequence[int] = (),
        *,
        cancelled: Callable[[], bool] | None = None,
    ) -> bytes: ...


def constants_of(own: Any) -> NgramConstants:
    """The constants of Transformers' `Qwen4ExpTextNGramEmbedding`, which may lie on the meta device."""
    from transformers.models.qwen4_exp import modeling_qwen4_exp as qwen4_exp

    with torch.device("cpu"):
        multipliers = qwen4_exp._build_layer_multipliers(
            own.unigram_vocab_size, own.ngram_size, own.ple_layer_index, own.seed
        )
    return NgramConstants(
        ngram_size=own.ngram_size,
        heads_per_ngram=own.heads_per_ngram,
        eos_token_id=own.eos_token_id,
        multipliers=tuple(multipliers.tolist()),
        head_sizes=tuple(own.head_vocab_sizes),
        head_offsets=tuple(own.head_offsets),
        rows=own.ngram_embedding.num_embeddings,
        row_elements=own.ngram_embedding.embedding_dim,
    )


class TableEmbedding(nn.Module):
    """Stands in for Transformers' `Qwen4ExpTextNGramEmbedding`.

    Holds no weight. `connect` must have been called before the first forward.
    """

    def __init__(self, constants: NgramConstants, layer_idx: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.constants = constants
        self.layer_idx = layer_idx
        self.dtype = dtype
        self.cancelled: Callable[[], bool] | None = None
        """Asked while a lookup waits for the daemon: set it to the request whose forward runs."""
        self.observe_lookup_s: Callable[[float], object] = lambda _: None
        self._source: RowSource | None = None

    def connect(self, source: RowSource) -> None:
        self._source = source

    def forward(self, input_ids: Tensor, past_key_values: Any) -> Tensor:
        """`input_ids`: [batch, tokens], padding already replaced by EOS -> [batch, tokens, elements].

        Raises ple_rpc.errors.TableError; never returns rows that the daemon did not send.
        """
        contexts = self._carry_context(input_ids, past_key_values)
        batch = zip(input_ids.tolist(), contexts, strict=True)
        return torch.stack([self._rows(tokens, context) for tokens, context in batch])

    def _carry_context(self, input_ids: Tensor, cache: Any) -> list[list[int]]:
        """The ids before this chunk, one list a sequence; keep this chunk's last ids for the next one."""
        length = self.constants.ngram_size - 1
        if cache is None:
            return [[] for _ in range(input_ids.shape[0])]
        contexts: list[list[int]] = [[] for _ in range(input_ids.shape[0])]
        keep = input_ids.long()
        if cache.has_previous_state(self.layer_idx, state_idx=_CONTEXT_STATE):
            contexts = cache.layers[self.layer_idx].conv_states[_CONTEXT_STATE].tolist()
        elif keep.shape[1] < length:
            # The cache would pad a short first chunk by zeros, which are ids of a token.
            padding = (length - keep.shape[1], 0)
            keep = nn.functional.pad(keep, padding, value=self.constants.eos_token_id)
        cache.update_conv_state(keep, self.layer_idx, state_idx=_CONTEXT_STATE, conv_kernel_size=length)
        return contexts

    def _rows(self, tokens: list[int], context: list[int]) -> Tensor:
        if self._source is None:
            raise RuntimeError("the n-gram embedding is not connected to a table")
        started = time.perf_counter()
        stored = self._source.lookup_tokens(tokens, context, cancelled=self.cancelled)
        self.observe_lookup_s(time.perf_counter() - started)
        rows = decode_rows(stored, self._source.description, self.dtype)
        return rows.view(len(tokens), -1)


def decode_rows(stored: bytes, table: table_pb2.TableDescription, out: torch.dtype) -> Tensor:
    """Stored rows -> [rows, row_elements] in `out`; fp8 becomes `row.to(out) * scale.to(out)`."""
    # A copy into torch's own memory: kernels may add in another order on memory aligned otherwise.
    raw = torch.frombuffer(bytearray(stored), dtype=_STORED[table.row_type])
    rows = raw.view(-1, table.row_elements).to(out, copy=True)
    if table.row_type == table_pb2.ROW_TYPE_FP8_E4M3:
        rows = rows * stored_scale(table).to(out)
    return rows


def stored_scale(table: table_pb2.TableDescription) -> Tensor:
    """The fp8 scale from its bits, as a scalar in the type that it is stored in."""
    bits = table.scale_bits.to_bytes(4, "little")[: table.scale_bytes]
    dtype = torch.bfloat16 if table.scale_bytes == 2 else torch.float32
    return torch.frombuffer(bytearray(bits), dtype=dtype)[0]
