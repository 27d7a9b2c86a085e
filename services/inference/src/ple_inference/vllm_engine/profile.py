"""What vLLM is told for a kind of machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from ple_inference.vllm_engine.refused import Refused

MIB, GIB = 2**20, 2**30
# What vLLM was seen to take of an H200 beside weights and K/V (activations, kernels, graphs), rounded up:
# docs/measurements/2026-11-30-int4-mixed.md. For images it is a guess.
_FIXED_BYTES, _TOKEN_BYTES, _IMAGE_BYTES = 256 * MIB, MIB // 4, 256 * MIB


@dataclass(frozen=True)
class Profile:
    """What decides memory and speed of one engine. K/V lies in GPU memory, the table in the daemon."""

    name: str
    summary: str
    stages: int
    """GPUs, one pipeline stage on each."""
    partition: tuple[int, ...] | None
    """Decoder layers of each stage; None: as even as it goes."""
    gpu_memory_bytes: int
    """Of one GPU, as CUDA counts it: what `plan` reckons with where there is none."""
    memory_bytes_per_s: float
    """That one GPU reads at the most, by its maker."""
    gpu_memory_utilization: float
    kv_cache_dtype: str
    """As vLLM names it: auto (the model's), fp8, ..."""
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int = 262_144
    prefix_caching: bool = True
    max_image_px: int = 2_097_152
    max_images: int = 4
    """In one request; 0: vLLM makes no vision tower."""

    def __post_init__(self) -> None:
        if self.partition is not None and len(self.partition) != self.stages:
            raise ValueError(f"{self.name}: {len(self.partition)} parts for {self.stages} stages")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization is {self.gpu_memory_utilization}, not in (0, 1]")
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, not a positive number")

    @property
    def capture_sizes(self) -> tuple[int, ...]:
        """Batch sizes of decode graphs: powers of two, and the largest batch."""
        powers = {2**power for power in range(self.max_num_seqs.bit_length())}
        return tuple(sorted(powers | {self.max_num_seqs}))

    @property
    def budget_bytes(self) -> int:
        """What vLLM may take of one GPU of the nominal size."""
        return int(self.gpu_memory_bytes * self.gpu_memory_utilization)

    def allowance_bytes(self, stage: int) -> int:
        """What a stage takes beside weights and K/V, roughly: vLLM replaces it by measuring at its start."""
        images = _IMAGE_BYTES if stage == 0 and self.max_images else 0
        return _FIXED_BYTES + _TOKEN_BYTES * self.max_num_batched_tokens + images

    def adapted(self, *, stages: int, max_num_seqs: int, max_model_len: int) -> Profile:
        """This profile with what is not 0 changed. Another number of stages has an even partition."""
        profile = self
        if stages and stages != self.stages:
            profile = replace(profile, stages=stages, partition=None)
        if max_num_seqs:
            profile = replace(profile, max_num_seqs=max_num_seqs)
        return replace(profile, max_model_len=max_model_len) if max_model_len else profile


def _by_name(*profiles: Profile) -> Mapping[str, Profile]:
    return MappingProxyType({profile.name: profile for profile in profiles})


# The first stage has one layer less for the vision tower. Longer requests than these want K/V in host memory,
# which is not built, or no tower.
_TRIPLE = Profile(
    name="triple-24gb",
    summary="three 24 GB cards (RTX 3090, 4090), fp8 K/V, requests of up to 98,304 tokens",
    stages=3,
    partition=(15, 17, 16),
    gpu_memory_bytes=24_259 * MIB,  # taken for what the driver leaves of a 3090's 24,576
    memory_bytes_per_s=936e9,  # RTX 3090
    gpu_memory_utilization=0.97,
    kv_cache_dtype="fp8",
    max_num_seqs=4,
    max_num_batched_tokens=512,
    max_model_len=98_304,
)

PROFILES = _by_name(
    _TRIPLE,
    replace(
        _TRIPLE,
        name="triple-24gb-text",
        summary="the same without images, for the whole context",
        partition=(16, 16, 16),
        max_model_len=262_144,
        max_images=0,
    ),
    Profile(
        name="dual-80gb",
        summary="two 80 GB cards, for a checkpoint of up to about 130 GB without its table",
        stages=2,
        partition=(24, 24),
        gpu_memory_bytes=79 * GIB,
        memory_bytes_per_s=2039e9,  # A100, the slowest of 80 GB
        gpu_memory_utilization=0.92,
        kv_cache_dtype="auto",
        max_num_seqs=16,
        max_num_batched_tokens=2048,
    ),
    Profile(
        name="single-140gb",
        summary="one H200, fp8 K/V, for a checkpoint of up to about 130 GB without its table",
        stages=1,
        partition=None,
        gpu_memory_bytes=139 * GIB,
        memory_bytes_per_s=4.8e12,  # H200
        gpu_memory_utilization=0.95,
        kv_cache_dtype="fp8",
        max_num_seqs=16,
        max_num_batched_tokens=2048,
    ),
)


def profile_named(name: str) -> Profile:
    """Raises Refused."""
    if "mtp" in name.lower():
        raise Refused(f"profile {name}: speculative decoding (MTP) is not built yet; use {_names()}")
    if name not in PROFILES:
        problem = f"there is no profile {name!r}" if name else "the vllm engine needs --profile"
        raise Refused(f"{problem}; profiles are {_names()}")
    return PROFILES[name]


def _names() -> str:
    return ", ".join(PROFILES)
