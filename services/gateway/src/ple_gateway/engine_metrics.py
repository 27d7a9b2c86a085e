"""What an engine's `/metrics` tells of its work: vLLM's names, and those of our reference engine."""

import math
import re
from dataclasses import dataclass

_RUNNING = {"vllm:num_requests_running", "ple_inference_sequences_running"}
_GENERATED = {"vllm:generation_tokens_total", "ple_inference_generation_tokens_total"}
_READ = {"vllm:prompt_tokens_total", "ple_inference_prompt_tokens_total"}
# These move while a long prompt is read, which counts as tokens only when it is done.
_SIGNS = {"vllm:kv_cache_usage_perc", "vllm:request_success_total", "ple_inference_table_lookups_total"}
_NUMBER = rb"[+-]?[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?"
_SAMPLE = re.compile(rb"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{[^\n]*\})? (" + _NUMBER + rb")(?: [0-9]+)?$", re.M)


@dataclass(frozen=True)
class EngineSample:
    """One look at an engine's counters."""

    running: float
    generated_tokens: float
    prompt_tokens: float
    signs: tuple[float, ...]  # equal in two looks: the engine has done nothing in between


def read_samples(page: bytes) -> dict[str, float]:
    """Sum a Prometheus page's samples by name; those that are no numbers are left out."""
    sums: dict[str, float] = {}
    for name, value in _SAMPLE.findall(page):
        number = float(value)
        if math.isfinite(number):
            key = name.decode()
            sums[key] = sums.get(key, 0.0) + number
    return sums


def engine_sample(page: bytes) -> EngineSample | None:
    """Return the sample; None when the page tells nothing about running requests."""
    sums = read_samples(page)
    if not _RUNNING & sums.keys():
        return None

    def total(names: set[str]) -> float:
        return sum(sums.get(name, 0.0) for name in names)

    signs = tuple(sums.get(name, 0.0) for name in sorted(_GENERATED | _READ | _SIGNS))
    return EngineSample(total(_RUNNING), total(_GENERATED), total(_READ), signs)


class StallDetector:
    """Judges by progress: a health endpoint that answers is no proof that tokens are made."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._signs: tuple[float, ...] | None = None
        self._moved_s = 0.0

    def look(self, sample: EngineSample | None, relayed: int, now_s: float, *, excused: bool) -> bool:
        """Whether the engine has requests and did nothing for `limit_s`; never while it is excused."""
        signs = None if sample is None else (*sample.signs, float(relayed))
        if sample is None or excused or not sample.running or signs != self._signs:
            self._signs, self._moved_s = signs, now_s
        return now_s - self._moved_s >= self._limit_s
