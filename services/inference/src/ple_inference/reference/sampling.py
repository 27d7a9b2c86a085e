"""Logits to a token, as OpenAI's and vLLM's parameters say."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

# Below, dividing by the temperature overflows, and nothing but the best token has a chance anyway.
_GREEDY_BELOW = 1e-5


class NoLegalTokenError(Exception):
    """The parameters of a request forbid every token."""


@dataclass(frozen=True)
class SamplingParams:
    """How one sequence is sampled and when it ends. Checked where requests are read."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: all tokens."""
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    max_tokens: int = 512
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logprobs: int | None = None
    """None: no logprobs; k: those of the chosen and of the k best tokens."""


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities of the model itself, before any parameter changed them."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Sampler:
    """One sequence's choice of tokens.

    Args:
        params: of the request.
        num_tokens: ids from here on have no text and are never chosen.
        generator: only this sequence draws from it, so that a seed means the same in any company.
    """

    def __init__(self, params: SamplingParams, num_tokens: int, prompt: Collection[int]) -> None:
        self._params, self._num_tokens = params, num_tokens
        self._prompt = set(prompt)
        self._counts: Counter[int] = Counter()
        self._generator = torch.Generator()
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed % 2**64)

    def choose(self, logits: Tensor, forbidden: Collection[int], allowed: Tensor | None) -> int:
        """Draw a token. `logits`: [vocab]; `allowed`: [vocab] bool of a grammar. Raises NoLegalTokenError."""
        scores = logits.float().clone()
        scores[self._num_tokens :] = -math.inf
        self._adjust(scores)
        if forbidden:
            scores[list(forbidden)] = -math.inf
        if allowed is not None:
            scores.masked_fill_(~allowed, -math.inf)
        best = scores.argmax()
        if scores[best] == -math.inf:
            raise NoLegalTokenError("the request's parameters leave no token to choose")
        token = int(best) if self._params.temperature < _GREEDY_BELOW else self._draw(scores)
        self._counts[token] += 1
        return token

    def _adjust(self, scores: Tensor) -> None:
        params = self._params
        for token, bias in params.logit_bias.items():
            scores[token] += bias
        if params.repetition_penalty != 1.0 and (seen := list(self._prompt | self._counts.keys())):
            values = scores[seen]
            scores[seen] = torch.where(
                values > 0, values / params.repetition_penalty, values * params.repetition_penalty
            )
        if self._counts and (params.frequency_penalty or params.presence_penalty):
            counts = torch.tensor(list(self._counts.values()), dtype=torch.float32)
            penalty = params.frequency_penalty * counts + params.presence_penalty
            scores[list(self._counts)] -= penalty
        # A tiny repetition penalty makes infinities, of which softmax makes NaN.
        scores.clamp_(max=torch.finfo(torch.float32).max)

    def _draw(self, scores: Tensor) -> int:
        params = self._params
        # Selecting the best first keeps a quarter of a million logits from being sorted for each token.
        width = params.top_k if 0 < params.top_k < scores.numel() else scores.numel()
        if width < scores.numel() or params.top_p < 1.0:
            scores, ids = scores.topk(width) if width < 4096 else scores.sort(descending=True)
        else:
            ids = torch.arange(scores.numel())
        probabilities = torch.softmax((scores - scores.max()) / params.temperature, -1)
        if params.top_p < 1.0:
            before = probabilities.cumsum(-1) - probabilities
            probabilities[before >= params.top_p] = 0
            # The best token always stays, whatever rounding did.
        if params.min_p > 0:
            probabilities[probabilities < params.min_p * probabilities.max()] = 0
        place = torch.multinomial(probabilities, 1, generator=self._generator)
        return int(ids[place])


def top_logprobs(logits: Tensor, token: int, count: int, num_tokens: int) -> TokenLogprobs:
    """Logprobs of `token` and of the `count` best. `logits`: [vocab]."""
    logprobs = torch.log_softmax(logits[:num_tokens].float(), -1)
    best = logprobs.topk(min(count, num_tokens))
    top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return TokenLogprobs(token, float(logprobs[token]), top)
