"""Logits to tokens."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ple_inference.reference.sampling import NoLegalTokenError, Sampler, SamplingParams, top_logprobs

LOGITS = torch.tensor([1.0, 3.0, 2.0, 0.5, 9.0])


def draw(count: int = 200, num_tokens: int = 4, **params: object) -> Counter[int]:
    sampler = Sampler(SamplingParams(**{"seed": 1, **params}), num_tokens, prompt=[])
    return Counter(sampler.choose(LOGITS, (), None) for _ in range(count))


def test_greedy_takes_the_best_token_that_has_text() -> None:
    assert draw(temperature=0) == {1: 200}


def test_top_k_top_p_and_min_p_narrow_the_choice() -> None:
    assert set(draw()) == {0, 1, 2, 3}
    assert set(draw(top_k=2)) == {1, 2}
    assert set(draw(top_p=0.5)) == {1}
    assert set(draw(top_p=0.01)) == {1}
    assert set(draw(min_p=0.3)) == {1, 2}
    assert set(draw(top_k=3, top_p=0.7)) == {1, 2}


def test_frequencies_follow_the_softmax() -> None:
    shares = torch.softmax(LOGITS[:4], -1)
    counts = draw(4000)
    for token, share in enumerate(shares.tolist()):
        assert abs(counts[token] / 4000 - share) < 0.03


@given(st.integers(-(2**63), 2**63 - 1))
def test_a_seed_means_the_same_tokens(seed: int) -> None:
    assert draw(20, seed=seed) == draw(20, seed=seed)


def test_seeds_differ_and_no_seed_is_random() -> None:
    orders = {tuple(_order(seed)) for seed in (1, 2, 3, None, None)}
    assert len(orders) == 5


def _order(seed: int | None) -> list[int]:
    sampler = Sampler(SamplingParams(seed=seed, temperature=2.0), 4, prompt=[])
    return [sampler.choose(LOGITS, (), None) for _ in range(60)]


def test_penalties_and_bias_move_the_best() -> None:
    assert draw(temperature=0, logit_bias={3: 100}) == {3: 200}
    assert set(draw(4, temperature=0, presence_penalty=2.0)) == {0, 1, 2}
    assert len(draw(40, temperature=0, frequency_penalty=0.5)) == 4
    assert set(draw(2, temperature=0, repetition_penalty=2.0)) == {1, 2}


@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize("temperature", [5e-324, 1e-45, 1e-38, 1e-9, 1e-5, 1e-3])
def test_any_cold_temperature_takes_the_best(temperature: float, top_p: float) -> None:
    assert draw(20, temperature=temperature, top_p=top_p) == {1: 20}


@pytest.mark.parametrize("penalty", [5e-324, 1e-45, 1e-30])
def test_any_small_repetition_penalty_leaves_something_to_draw(penalty: float) -> None:
    draw(20, repetition_penalty=penalty)


def test_forbidden_and_grammar_leave_the_rest() -> None:
    sampler = Sampler(SamplingParams(temperature=0), 4, prompt=[])
    assert sampler.choose(LOGITS, [1], None) == 2
    only_three = torch.tensor([False, False, False, True, True])
    assert sampler.choose(LOGITS, (), only_three) == 3
    with pytest.raises(NoLegalTokenError):
        sampler.choose(LOGITS, [3], only_three)


def test_logits_are_left_as_they_were() -> None:
    before = LOGITS.clone()
    draw(3, logit_bias={0: 5}, frequency_penalty=1.0, top_k=2)
    assert torch.equal(LOGITS, before)


def test_logprobs_are_the_models_own() -> None:
    entry = top_logprobs(LOGITS, token=0, count=2, num_tokens=4)
    assert [token for token, _ in entry.top] == [1, 2]
    assert math.isclose(entry.logprob, torch.log_softmax(LOGITS[:4], -1)[0].item(), rel_tol=1e-6)
