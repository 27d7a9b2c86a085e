"""One answer in the making: from a prompt to text, token by token."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from ple_inference.reference.forward import Forward, ImageInputs
from ple_inference.reference.grammar import GrammarState
from ple_inference.reference.sampling import Sampler, SamplingParams, TokenLogprobs, top_logprobs
from ple_inference.reference.stop import StopStrings
from ple_inference.reference.vocabulary import TextStream, Vocabulary

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Prompt:
    """Token ids, image placeholders expanded, and the images that stand there."""

    tokens: list[int]
    images: ImageInputs | None = None


@dataclass(frozen=True)
class Delta:
    """A token's contribution. `text` may be empty while text is held back."""

    token: int
    text: str
    logprobs: TokenLogprobs | None


@dataclass(frozen=True)
class Finished:
    """The last event of an answer that ended well. `text` is what was held back till then."""

    reason: FinishReason
    text: str
    completion_tokens: int
    reasoning_tokens: int


@dataclass(frozen=True)
class Failed:
    """The last event of an answer that could not be finished."""

    error: Exception


Event = Delta | Finished | Failed


@dataclass(frozen=True)
class Ending:
    """What ends an answer besides its length. The think id is None outside thinking."""

    eos_token_ids: frozenset[int]
    think_end_id: int | None = None


class Sequence:
    """What the engine steps. `deliver` is called on the engine's thread and must not block.

    Events: any number of Delta, then one Finished or Failed; none after `cancel`.
    """

    def __init__(
        self,
        name: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        vocabulary: Vocabulary,
        ending: Ending,
        grammar: GrammarState | None,
        deliver: Callable[[Event], None],
    ) -> None:
        self.name, self.prompt, self.params = name, prompt, params
        self.deliver = deliver
        self._ending, self._vocabulary = ending, vocabulary
        self._grammar = grammar
        self._thinking = ending.think_end_id is not None
        self._sampler = Sampler(params, vocabulary.size, prompt.tokens)
        self._text = TextStream(vocabulary)
        self._stops = StopStrings(params.stop)
        self._cancelled = threading.Event()
        self._completion_tokens = self._reasoning_tokens = 0
        self.forward: Forward | None = None
        """Set by the engine at admission."""
        self.last_token: int | None = None
        """None until the prompt is computed."""

    def cancel(self) -> None:
        """Give the answer up. Any thread."""
        self._cancelled.set()

    def is_cancelled(self) -> bool:
        return self._cancelled.is_set()

    @property
    def _stop_ids(self) -> frozenset[int]:
        eos = frozenset() if self.params.ignore_eos else self._ending.eos_token_ids
        return eos | self.params.stop_token_ids

    def take(self, logits: Tensor) -> Finished | None:
        """Choose the next token and deliver it. `logits`: [vocab]. Raises NoLegalTokenError."""
        early = self._completion_tokens < self.params.min_tokens
        forbidden = self._stop_ids if early else frozenset()
        grammar = None if self._thinking else self._grammar
        allowed = grammar.allowed() if grammar is not None else None
        token = self._sampler.choose(logits, forbidden, allowed)
        self.last_token = token
        self._completion_tokens += 1
        if token in self._stop_ids:
            return self._finish("stop")
        if grammar is not None:
            grammar.accept(token)
        self._count_thoughts(token)
        text, stopped = self._stops.push(self._text.push(token), armed=not early)
        self.deliver(Delta(token, text, self._logprobs(logits, token)))
        if stopped or (grammar is not None and grammar.complete()):
            return self._finish("stop", flush=not stopped)
        if self._completion_tokens >= self.params.max_tokens:
            return self._finish("length")
        return None

    def _count_thoughts(self, token: int) -> None:
        if self._thinking:
            self._reasoning_tokens += 1
            self._thinking = token != self._ending.think_end_id

    def _logprobs(self, logits: Tensor, token: int) -> TokenLogprobs | None:
        if self.params.logprobs is None:
            return None
        return top_logprobs(logits, token, self.params.logprobs, self._vocabulary.size)

    def _finish(self, reason: FinishReason, *, flush: bool = True) -> Finished:
        text = self._stops.flush() if flush else ""
        return Finished(reason, text, self._completion_tokens, self._reasoning_tokens)
