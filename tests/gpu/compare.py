"""Holds two engines' log-probabilities against each other."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

Positions = list[dict[str, Any]]

NEAR_TIE = 0.1
"""Two candidates this close in log-probability may change places: twice what bf16 moves them, see `docs`."""


@dataclass(frozen=True)
class Agreement:
    """Of the best token and of the prompt's own token, over all positions of all prompts."""

    positions: int
    argmax_equal: int
    parted_at_near_ties: int
    parted_among_many: int
    """All that were listed are that close, and so may be those that were not."""
    parted_elsewhere: int
    median_difference: float
    p999_difference: float
    largest_difference: float

    def __str__(self) -> str:
        return (
            f"{self.argmax_equal}/{self.positions} best tokens equal, {self.parted_at_near_ties} part at "
            f"near-ties, {self.parted_among_many} among many, {self.parted_elsewhere} elsewhere; "
            f"difference median {self.median_difference:.4f}, p99.9 {self.p999_difference:.4f}, "
            f"max {self.largest_difference:.4f}"
        )


def agreement(ours: list[Positions], theirs: list[Positions], near_tie: float = NEAR_TIE) -> Agreement:
    """Differences are of the log-probability of the prompt's own next token."""
    equal = near = many = elsewhere = 0
    differences = []
    for our, their in zip(ours, theirs, strict=False):
        for a, b in zip(our, their, strict=True):
            differences.append(abs(a["actual"] - b["actual"]))
            if a["top"][0] == b["top"][0]:
                equal += 1
            elif _gap(b, a["top"][0]) <= near_tie or _gap(a, b["top"][0]) <= near_tie:
                near += 1
            elif max(_spread(a), _spread(b)) <= near_tie:
                many += 1
            else:
                elsewhere += 1
    differences.sort()
    return Agreement(
        len(differences), equal, near, many, elsewhere, statistics.median(differences),
        differences[int(len(differences) * 0.999)], differences[-1],
    )  # fmt: skip


def _gap(position: dict[str, Any], token: int) -> float:
    """How far a token is behind the best one; infinite when it is not among the best few."""
    if token not in position["top"]:
        return float("inf")
    place = position["top"].index(token)
    return float(position["top_logprobs"][0] - position["top_logprobs"][place])


def _spread(position: dict[str, Any]) -> float:
    """From the best token to the last one that was listed."""
    return float(position["top_logprobs"][0] - position["top_logprobs"][-1])


def gap_where_parting(a: dict[str, Any], b: dict[str, Any]) -> float | None:
    """The smaller gap of the two best log-probabilities where greedy answers part; None if they do not."""
    for place, (left, right) in enumerate(zip(a["tokens"], b["tokens"], strict=True)):
        if left != right:
            return float(min(a["gaps"][place], b["gaps"][place]))
    return None


def answers_agreement(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> str:
    gaps = [gap_where_parting(a, b) for a, b in zip(ours, theirs, strict=False)]
    parted = [gap for gap in gaps if gap is not None]
    equal = len(gaps) - len(parted)
    return f"{equal}/{len(gaps)} equal, gaps where others part: {[round(gap, 3) for gap in parted]}"
