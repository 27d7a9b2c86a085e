"""Qwen4Exp's state under pipeline parallelism, with rows from the daemon where the PLE layer is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.models.qwen4_exp.nvidia.model_state import Qwen4ExpModelState
from vllm.models.qwen4_exp.nvidia.ngram_embedding import Qwen4ExpNGramEmbedding
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.mm.encoder_cache import EncoderCache
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState
from vllm.v1.worker.gpu.states import RequestState

from ple_inference.vllm_plugin.daemon_embedding import DaemonNGramEmbedding
from ple_inference.vllm_plugin.prompt_hints import PromptHints
from ple_inference.vllm_plugin.switches import triplex_options
from ple_inference.vllm_plugin.table_link import TableLink
from ple_inference.vllm_plugin.table_options import TableOptions


class TriplexModelState(Qwen4ExpModelState):
    """Stock behaviour with two differences: a rank without a PLE layer prepares no n-gram inputs, and on the
    rank with one each step's rows are fetched before the forward.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        model: nn.Module,
        encoder_cache: EncoderCache | None,
        device: torch.device,
    ) -> None:
        # Past Qwen4ExpModelState's own, which refuses pipeline stages.
        MambaHybridModelState.__init__(self, vllm_config, model, encoder_cache, device)
        self.lookups_paused = False
        self._link: TableLink | None = None
        ngram = ngram_embedding_of(model)
        self.uses_ngram_embedding = ngram is not None
        self.ngram_context_len = 0
        self.ngram_eos_token_id = 0
        if ngram is None:
            return
        self._make_ngram_buffers(ngram)
        if isinstance(ngram, DaemonNGramEmbedding):
            self._ngram = ngram
            options = TableOptions.of(triplex_options(vllm_config.additional_config))
            self._link = TableLink(options, ngram, self.max_num_tokens)
            self._hints = PromptHints(self._link.client, self.ngram_context_len)

    def _make_ngram_buffers(self, ngram: Qwen4ExpNGramEmbedding) -> None:
        """What Qwen4ExpModelState's methods read, under its names."""
        self.ngram_context_len = ngram.ngram_size - 1
        self.ngram_eos_token_id = ngram.eos_token_id
        self.ngram_context = torch.full(
            (self.max_num_reqs, self.ngram_context_len),
            self.ngram_eos_token_id,
            dtype=torch.int32,
            device=self.device,
        )
        self.ngram_context_offsets = torch.arange(-self.ngram_context_len, 0, device=self.device)
        self.ple_query_start_loc = torch.zeros(self.max_num_reqs + 1, dtype=torch.int32, device=self.device)

    def add_request(self, req_index: int, new_req_data: NewRequestData) -> None:
        super().add_request(req_index, new_req_data)
        tokens = new_req_data.prefill_token_ids
        if self._link is not None and not self.lookups_paused and tokens is not None:
            self._hints.admit(new_req_data.req_id, tokens, new_req_data.num_computed_tokens)

    def remove_request(self, req_id: str) -> None:
        super().remove_request(req_id)
        if self._link is not None:
            self._hints.drop(req_id)

    def prepare_inputs(self, input_batch: InputBatch, req_states: RequestState) -> dict[str, Any]:
        inputs = super().prepare_inputs(input_batch, req_states)
        if self._link is not None and self._is_real(input_batch, req_states):
            tokens = input_batch.input_ids[: input_batch.num_tokens]
            ids = self._ngram.row_ids(tokens, inputs["query_start_loc"], inputs["ngram_context"])
            self._link.rows.deliver(ids, self._ngram.ngram_embedding.row_bytes[: len(tokens)])
        return inputs

    def _is_real(self, input_batch: InputBatch, req_states: RequestState) -> bool:
        """Whether somebody asked for these tokens: profiling and capture make batches of their own."""
        return not self.lookups_paused and all(
            req_id in req_states.req_id_to_index for req_id in input_batch.req_ids
        )

    @contextmanager
    def without_lookups(self) -> Iterator[None]:
        """Warm-up sends requests of its own through the whole path: their rows do not matter."""
        self.lookups_paused = True
        try:
            yield
        finally:
            self.lookups_paused = False

    def close(self) -> None:
        if self._link is not None:
            self._link.close()


def ngram_embedding_of(model: nn.Module) -> Qwen4ExpNGramEmbedding | None:
    """This rank's n-gram embedding, if it has the PLE layer."""
    found = [module for module in model.modules() if isinstance(module, Qwen4ExpNGramEmbedding)]
    if len(found) > 1:
        raise ValueError(f"{len(found)} PLE layers on one rank: the daemon serves one table")
    return found[0] if found else None
