"""The thread that computes: admits sequences first come, first served, and steps them in turn."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence as ManyOf
from typing import Protocol

from ple_inference.reference.forward import Forward
from ple_inference.reference.model import ReferenceModel
from ple_inference.reference.sampling import NoLegalTokenError
from ple_inference.reference.sequence import Failed, Finished, Sequence
from ple_rpc.errors import LookupCancelled, TableError

_log = logging.getLogger(__name__)
_IDLE_WAIT_S = 60.0


class QueueFullError(Exception):
    """As many sequences wait as may."""


class EngineStoppedError(Exception):
    """The engine takes nothing more."""


class Prefetcher(Protocol):
    """What the engine asks of `ple_rpc.client.TableClient` beside rows; never blocks, never raises."""

    def prefetch(self, request_id: str, tokens: ManyOf[int]) -> None: ...

    def cancel_prefetch(self, request_id: str) -> None: ...


class Engine:
    """Decodes up to `max_num_seqs` sequences in turn, one forward each; others wait.

    A sequence that fails takes no other one with it.
    """

    def __init__(
        self,
        model: ReferenceModel,
        prefetcher: Prefetcher,
        *,
        max_num_seqs: int,
        max_queued: int,
        chunk_tokens: int,
    ) -> None:
        self._model, self._prefetcher = model, prefetcher
        self._max_num_seqs, self._max_queued, self._chunk_tokens = max_num_seqs, max_queued, chunk_tokens
        self._changed = threading.Condition()
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def submit(self, sequences: list[Sequence]) -> None:
        """Queue all or none. Any thread. Raises QueueFullError, EngineStoppedError."""
        with self._changed:
            if self._stopping:
                raise EngineStoppedError("the engine is stopping")
            self._drop_cancelled()
            places = self._max_num_seqs + self._max_queued - len(self._running) - len(self._waiting)
            if len(sequences) > places:
                raise QueueFullError(f"{len(self._waiting)} sequences wait already")
            self._waiting.extend(sequences)
            for sequence in sequences:
                self._prefetcher.prefetch(sequence.name, sequence.prompt.tokens)
            self._changed.notify()

    def stop(self, deadline_s: float) -> None:
        """Fail what is left and end the thread. Any thread but the engine's."""
        with self._changed:
            self._stopping = True
            left = [*self._waiting, *self._running]
            self._waiting.clear()
            self._changed.notify()
        for sequence in left:
            sequence.cancel()
            sequence.deliver(Failed(EngineStoppedError("the engine is stopping")))
        if self._thread.is_alive():
            self._thread.join(deadline_s)

    def _run(self) -> None:
        while self._admit():
            for sequence in list(self._running):
                if not self._advance(sequence):
                    self._running.remove(sequence)
                    self._prefetcher.cancel_prefetch(sequence.name)

    def _drop_cancelled(self) -> None:
        """Give the places of waiting sequences that nobody wants any more to others. Under the lock."""
        for sequence in [waiting for waiting in self._waiting if waiting.is_cancelled()]:
            self._waiting.remove(sequence)
            self._prefetcher.cancel_prefetch(sequence.name)

    def _admit(self) -> bool:
        """Fill free places, waiting for work when there is none; False once stopping."""
        with self._changed:
            while not (self._stopping or self._waiting or self._running):
                self._changed.wait(_IDLE_WAIT_S)
            self._drop_cancelled()
            while self._waiting and len(self._running) < self._max_num_seqs:
                self._running.append(self._waiting.popleft())
            return not self._stopping

    def _advance(self, sequence: Sequence) -> bool:
        """One forward and one token of a sequence; False when it is over."""
        if sequence.is_cancelled():
            return False
        try:
            finished = self._step(sequence)
        except LookupCancelled:
            return False
        except (TableError, NoLegalTokenError) as error:
            _log.warning("sequence failed sequence=%s error=%s", sequence.name, error)
            sequence.deliver(Failed(error))
            return False
        except Exception as error:
            _log.exception("sequence failed sequence=%s", sequence.name)
            sequence.deliver(Failed(error))
            return False
        if finished is not None:
            sequence.deliver(finished)
        return finished is None

    def _step(self, sequence: Sequence) -> Finished | None:
        self._model.table.cancelled = sequence.is_cancelled
        if sequence.forward is None:
            prompt = sequence.prompt
            sequence.forward = Forward(self._model, prompt.tokens, prompt.images, self._chunk_tokens)
        if sequence.last_token is None:
            logits = sequence.forward.prefill()
        else:
            logits = sequence.forward.decode(sequence.last_token)
        return None if logits is None else sequence.take(logits)
