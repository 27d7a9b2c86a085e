"""The worker's connection to the daemon: made, checked against the model, and closed as one."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from ple_inference.table_check import NgramConstants, check_scale, check_table
from ple_inference.vllm_plugin.daemon_embedding import DaemonNGramEmbedding
from ple_inference.vllm_plugin.row_source import RowSource, end_process
from ple_inference.vllm_plugin.table_options import SLOTS, TableOptions
from ple_inference.vllm_plugin.table_wait import WaitReporter
from ple_rpc.client import ClientOptions, TableClient
from ple_rpc.table.v1 import table_pb2

_log = logging.getLogger("vllm.triplex")

# After this the client looks whether the daemon lives.
_ANSWER_S = 1.0
_ROW_TYPES = {
    torch.bfloat16: table_pb2.ROW_TYPE_BF16,
    torch.float8_e4m3fn: table_pb2.ROW_TYPE_FP8_E4M3,
}


class TableLink:
    """Client, row source and wait reporter of one worker process. gRPC starts here, never before a fork."""

    def __init__(self, options: TableOptions, ngram: DaemonNGramEmbedding, max_tokens: int) -> None:
        """Waits for the daemon. Raises TableError when none comes, WrongTableError for another table."""
        max_ids = max_tokens * ngram.ngram_heads
        self.client = TableClient(
            options.table,
            ClientOptions(
                client_name="vllm",
                lookup_deadline_s=options.lookup_deadline_s,
                slots=SLOTS,
                max_rows_per_slot=max_ids,
            ),
        )
        self._reporter: WaitReporter | None = None
        try:
            self.client.wait_ready(options.table_wait_s, lambda reason: _log.info("no table yet: %s", reason))
            check(self.client.description, ngram)
            row_bytes = self.client.description.row_bytes
            self.rows = RowSource(
                self.client, max_ids, row_bytes, _ANSWER_S, ngram.ngram_embedding.rows_there, end_process
            )
            self.rows.connect()
            if options.wait_file is not None:
                self._reporter = WaitReporter(Path(options.wait_file), self._progress)
        except BaseException:
            self.client.close()
            raise
        _log.info(
            "table connected address=%s rows=%d row_bytes=%d shared_memory=%s",
            options.table, self.client.description.rows, row_bytes, self.client.region is not None,
        )  # fmt: skip

    def _progress(self) -> tuple[float | None, int]:
        """Since when a lookup waits for a daemon, and steps that were given their rows."""
        return self.client.stats.waiting_since, self.rows.deliveries

    def close(self) -> None:
        if self._reporter is not None:
            self._reporter.close()
        self.rows.close()


def check(table: table_pb2.TableDescription, ngram: DaemonNGramEmbedding) -> None:
    """Compare the daemon's table with what vLLM built and loaded. Raises WrongTableError."""
    embedding = ngram.ngram_embedding
    dtype = embedding.embedding_method.lookup_dtype(embedding)
    check_table(table, constants_of(ngram), _ROW_TYPES.get(dtype, table_pb2.ROW_TYPE_UNSPECIFIED))
    scale = getattr(embedding, "weight_scale", None)
    if scale is not None:
        check_scale(table, float(scale))


def constants_of(ngram: DaemonNGramEmbedding) -> NgramConstants:
    """The hash buffers as the checkpoint left them."""
    return NgramConstants(
        ngram_size=ngram.ngram_size,
        heads_per_ngram=ngram.heads_per_ngram,
        eos_token_id=ngram.eos_token_id,
        multipliers=tuple(ngram.layer_multipliers.tolist()),
        head_sizes=tuple(ngram.ngram_heads_vocab_sizes.tolist()),
        head_offsets=tuple(ngram.ngram_heads_offsets.tolist()),
        rows=ngram.ngram_embedding.num_embeddings,
        row_elements=ngram.head_dim,
    )
