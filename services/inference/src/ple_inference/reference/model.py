"""Transformers' Qwen4Exp with the n-gram table left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from ple_inference.reference.table_embedding import TableEmbedding, constants_of

# Typed too loosely to be checked against.
_Qwen4Exp: Any = transformers.Qwen4ExpForConditionalGeneration
_logging: Any = transformers.utils.logging


class ReferenceModel(_Qwen4Exp):  # type: ignore[misc]
    """The checkpoint's model whose n-gram embedding is a `TableEmbedding`.

    from_pretrained builds on the meta device, so that the replaced table is never allocated, and its
    tensors are keys that nothing in the model asks for, so that they are never read.
    """

    _keys_to_ignore_on_load_unexpected = [r"^mtp\.", r"\.ple_embedding\."]  # noqa: RUF012 - as upstream

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.table = self._leave_table_out()

    def _leave_table_out(self) -> TableEmbedding:
        (layer,) = [layer for layer in self.model.language_model.layers if layer.ple is not None]
        own = layer.ple.ple_embedding
        dtype = own.ngram_embedding.weight.dtype
        layer.ple.ple_embedding = TableEmbedding(constants_of(own), own.layer_idx, dtype)
        table: TableEmbedding = layer.ple.ple_embedding
        return table


def load_model(folder: Path, num_threads: int) -> ReferenceModel:
    """Load everything but the table, in the checkpoint's dtype. Takes the process's torch threads over."""
    torch.set_num_threads(num_threads)
    _logging.set_verbosity_error()
    _logging.disable_progress_bar()
    model: ReferenceModel = ReferenceModel.from_pretrained(folder, dtype="auto").eval()
    model.requires_grad_(False)
    return model
