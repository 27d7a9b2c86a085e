"""Tells the daemon which prompts come next, and which no longer do."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Protocol


class HintSink(Protocol):
    """What is asked of `ple_rpc.client.TableClient`: neither call blocks or raises."""

    def prefetch(
        self, request_id: str, tokens: Sequence[int], context: Sequence[int], epoch: int
    ) -> None: ...

    def cancel_prefetch(self, request_id: str, epoch: int) -> None: ...


class PromptHints:
    """One hint for each stay of a request on the GPU, under an epoch of its own.

    A request that was preempted comes back under a newer epoch: a cancel that is late cannot hit it.
    """

    def __init__(self, sink: HintSink, context_length: int) -> None:
        self._sink = sink
        self._context_length = context_length
        self._epochs = count(1)
        self._live: dict[str, int] = {}

    def admit(self, request_id: str, tokens: Sequence[int], computed: int) -> None:
        """Ask for the rows of tokens[computed:]; those before it are cached or computed already."""
        if computed >= len(tokens):
            return
        self._live[request_id] = epoch = next(self._epochs)
        before = tokens[max(0, computed - self._context_length) : computed]
        self._sink.prefetch(request_id, tokens[computed:], before, epoch)

    def drop(self, request_id: str) -> None:
        """The request ended or was preempted. Unknown ones are passed over."""
        epoch = self._live.pop(request_id, None)
        if epoch is not None:
            self._sink.cancel_prefetch(request_id, epoch)
