"""All parts of a loaded reference engine, as the HTTP server uses them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ple_inference.checkpoint import Checkpoint
from ple_inference.metrics import Metrics
from ple_inference.reference.chat_prompt import ChatTemplate
from ple_inference.reference.engine import Engine
from ple_inference.reference.grammar import GrammarCompiler
from ple_inference.reference.images import ImageReader
from ple_inference.reference.model import load_model
from ple_inference.reference.vocabulary import Vocabulary
from ple_inference.settings import Settings
from ple_inference.table_check import PROTOCOL_VERSION, WrongTableError, check_table, row_type_of
from ple_rpc.client import TableClient

_log = logging.getLogger(__name__)
_WAIT_LOG_INTERVAL_S = 5.0
_ENGINE_STOP_DEADLINE_S = 5.0


@dataclass(frozen=True)
class Service:
    """A loaded model, the table's client and the thread that computes."""

    settings: Settings
    checkpoint: Checkpoint
    vocabulary: Vocabulary
    template: ChatTemplate
    images: ImageReader
    grammars: GrammarCompiler
    engine: Engine
    client: TableClient

    @property
    def max_model_len(self) -> int:
        limit = self.checkpoint.max_positions
        return min(limit, self.settings.max_model_len) if self.settings.max_model_len else limit

    @property
    def vocab_size(self) -> int:
        return int(self.checkpoint.text["vocab_size"])

    @property
    def image_token_id(self) -> int:
        return int(self.checkpoint.config["image_token_id"])

    @property
    def generation_defaults(self) -> dict[str, Any]:
        return self.checkpoint.generation

    def close(self) -> None:
        """End the engine, then the connection that it uses."""
        self.engine.stop(0)
        self.client.close()
        self.engine.stop(_ENGINE_STOP_DEADLINE_S)
        self.grammars.close()


def load_service(
    settings: Settings, checkpoint: Checkpoint, metrics: Metrics, client: TableClient
) -> Service:
    """Load the model, wait for the daemon, check its table, start the engine. Blocks.

    Raises WrongTableError, ple_rpc.errors.TableError (the daemon did not come), OSError.
    """
    started = time.monotonic()
    model = load_model(checkpoint.path, settings.num_threads)
    _log.info("model loaded path=%s seconds=%.1f", checkpoint.path, time.monotonic() - started)
    described = client.wait_ready(settings.table_wait_deadline_s, _log_waits(settings.table_address))
    if described.protocol_version != PROTOCOL_VERSION:
        raise WrongTableError(
            f"the daemon speaks protocol {described.protocol_version}, this service {PROTOCOL_VERSION}"
        )
    check_table(described.table, model.table.constants, row_type_of(checkpoint.config))
    model.table.connect(client)
    model.table.observe_lookup_s = metrics.lookup_s.observe
    vocabulary = Vocabulary(checkpoint.path)
    vocab_size = int(checkpoint.text["vocab_size"])
    service = Service(
        settings=settings,
        checkpoint=checkpoint,
        vocabulary=vocabulary,
        template=ChatTemplate(checkpoint.path),
        images=ImageReader(checkpoint.path, settings.max_image_px),
        grammars=GrammarCompiler(
            vocabulary, vocab_size, checkpoint.eos_token_ids, settings.grammar_deadline_s
        ),
        engine=Engine(
            model,
            client,
            max_num_seqs=settings.max_num_seqs,
            max_queued=settings.max_queued,
            chunk_tokens=settings.prefill_chunk_tokens,
        ),
        client=client,
    )
    service.engine.start()
    metrics.watch_sequences(lambda: service.engine.num_running, lambda: service.engine.num_waiting)
    return service


def _log_waits(address: str) -> Callable[[str], None]:
    """Tell that the daemon is waited for, every few seconds."""
    last: float | None = None

    def log(reason: str) -> None:
        nonlocal last
        now = time.monotonic()
        if last is None or now - last >= _WAIT_LOG_INTERVAL_S:
            last = now
            _log.info("waiting for the table daemon address=%s reason=%s", address, reason)

    return log
