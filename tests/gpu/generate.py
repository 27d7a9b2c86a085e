"""Prompts, and what the scenarios ask an engine for."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

VOCABULARY = 240_000
Found = dict[str, Any]


def sampling(tokens: int, **arguments: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False, **arguments)


def prompts(rows: list[list[int]]) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": row} for row in rows]


def random_prompts(lengths: list[int], seed: int = 7) -> list[list[int]]:
    """The same for the same lengths, in every engine."""
    rng = random.Random(seed)
    return [[rng.randrange(1000, VOCABULARY) for _ in range(length)] for length in lengths]


def greedy(llm: Any, rows: list[list[int]], count: int) -> list[Found]:
    """Greedy answers to prompts in one batch: tokens, the gap of the best two at each, cached tokens."""
    outputs = llm.generate(prompts(rows), sampling(count, logprobs=2), use_tqdm=False)
    found = []
    for output in outputs:
        (completion,) = output.outputs
        gaps = []
        for step in completion.logprobs:
            values = sorted((entry.logprob for entry in step.values()), reverse=True)
            gaps.append(values[0] - values[1] if len(values) > 1 else 0.0)
        found.append({"tokens": list(completion.token_ids), "gaps": gaps, "cached": output.num_cached_tokens})
    return found


def block_size(llm: Any) -> int:
    """Of the prefix cache, as a worker knows it: it is decided where the cache is planned."""
    return max(size for size in llm.collective_rpc("block_size"))


def stream(
    llm: Any, row: list[int], count: int, at: Mapping[int, Callable[[], object]] | None = None
) -> Found:
    """Tokens and seconds of each engine step; `at` says what happens before which token."""
    engine_ = llm.llm_engine
    engine_.add_request(f"stream-{time.monotonic_ns()}", prompts([row])[0], sampling(count))
    tokens: list[int] = []
    times = [time.perf_counter()]
    pending = dict(at or {})
    while engine_.has_unfinished_requests():
        for output in engine_.step():
            tokens = list(output.outputs[0].token_ids)
            times.append(time.perf_counter())
        for due in [number for number in pending if number <= len(tokens)]:
            pending.pop(due)()
    return {"tokens": tokens, "steps_s": [after - before for before, after in pairwise(times)]}
