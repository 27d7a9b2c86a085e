"""What a start of vLLM would run and take, without starting it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any

from ple_inference.vllm_engine import rank_memory
from ple_inference.vllm_engine.bytes_per_token import BytesPerToken, bytes_per_token
from ple_inference.vllm_engine.host_memory import HostMemory
from ple_inference.vllm_engine.kv_figures import KvOptions, KvPlan, KvShape
from ple_inference.vllm_engine.launch import Launch
from ple_inference.vllm_engine.profile import GIB, Profile
from ple_inference.vllm_engine.rank_memory import RankMemory, rank_memories
from ple_inference.vllm_engine.stored_values import check_values


@dataclass(frozen=True)
class Plan:
    """Everything that `ple-inference plan` says. Sizes of GPUs are the profile's, not this machine's."""

    launch: Launch
    memory: tuple[RankMemory, ...]
    """Of each stage, loaded."""
    reads: BytesPerToken
    host: HostMemory
    kv_bytes: tuple[int, ...]
    """What each stage has for K/V, by the profile's allowance; not positive: the weights do not fit."""
    kv: KvPlan | None
    kv_problem: str
    """Why `kv` is None or has no blocks; empty when it has."""

    @property
    def command(self) -> str:
        """For a shell."""
        environment = [f"{name}={value}" for name, value in self.launch.environment.items()]
        return shlex.join([*environment, "vllm", *self.launch.arguments])

    def left_bytes(self, stage: int) -> int | None:
        """What a loaded stage and its K/V leave of a GPU; None where K/V is not known."""
        kv_bytes = self.kv_taken_bytes(stage)
        if kv_bytes is None:
            return None
        return self.launch.profile.gpu_memory_bytes - self.memory[stage].reserved_bytes - kv_bytes

    def kv_taken_bytes(self, stage: int) -> int | None:
        """None without vLLM's planner."""
        return self.kv.pool_blocks * self.kv.block_bytes[stage] if self.kv else None


def make_plan(launch: Launch) -> Plan:
    """Raises Refused, CheckpointError for scales that are no numbers, where there is more than headers."""
    check_values(launch.tensors, launch.checkpoint.text, written=False)
    profile, text, modules = launch.profile, launch.checkpoint.text, launch.rank_modules()
    memory = rank_memories(modules, text, launch.load_options)
    kv_bytes = tuple(
        profile.budget_bytes - rank.reserved_bytes - profile.allowance_bytes(stage)
        for stage, rank in enumerate(memory)
    )
    kv, problem = _plan_kv(launch, kv_bytes)
    reads = bytes_per_token(
        modules, text, kv_bytes=1 if "fp8" in profile.kv_cache_dtype else 2, context=profile.max_model_len
    )
    return Plan(launch, memory, reads, HostMemory.of(launch), kv_bytes, kv, problem)


def kv_options(profile: Profile) -> KvOptions:
    return KvOptions(
        max_model_len=profile.max_model_len,
        max_num_seqs=profile.max_num_seqs,
        max_num_batched_tokens=profile.max_num_batched_tokens,
        kv_cache_dtype=profile.kv_cache_dtype,
        prefix_caching=profile.prefix_caching,
    )


def _plan_kv(launch: Launch, kv_bytes: Sequence[int]) -> tuple[KvPlan | None, str]:
    if find_spec("vllm") is None:
        return None, "not known: vLLM is not installed here, and the figures come from its planner"
    from ple_inference.vllm_engine.kv_plan import NoRoom, plan_kv

    shape = KvShape.of(launch.checkpoint.text, images="vision_config" in launch.checkpoint.config)
    options, partition = kv_options(launch.profile), launch.pipeline.partition
    if min(kv_bytes) <= 0:
        return plan_kv(shape, options, partition), "the weights leave no room for K/V"
    try:
        return plan_kv(shape, options, partition, kv_bytes=kv_bytes), ""
    except NoRoom as error:
        return plan_kv(shape, options, partition), str(error)


def as_json(plan: Plan) -> dict[str, Any]:
    pipeline, profile = plan.launch.pipeline, plan.launch.profile
    return {
        "profile": asdict(profile),
        "command": ["vllm", *plan.launch.arguments],
        "environment": dict(plan.launch.environment),
        "table_stage": pipeline.owner,
        "table_layer": pipeline.ple_layer,
        "host": {"pinned_bytes": plan.host.pinned_bytes, "total_bytes": plan.host.total_bytes},
        "stages": [
            {
                "layers": [layers.start, layers.stop],
                **rank_memory.as_json(rank),
                "allowance_bytes": profile.allowance_bytes(stage),
                "kv_room_bytes": max(0, plan.kv_bytes[stage]),
                "kv_bytes": plan.kv_taken_bytes(stage),
                "left_bytes": plan.left_bytes(stage),
            }
            for stage, rank in enumerate(plan.memory)
            for layers in [pipeline.layers_of(stage)]
        ],
        "reads_per_token": {
            **asdict(plan.reads),
            "weights": dict(plan.reads.weights),
            "weights_bytes": plan.reads.weights_bytes,
            "tokens_per_s": round(plan.reads.tokens_per_s(profile.memory_bytes_per_s), 1),
        },
        "kv": _kv_json(plan.kv),
        "kv_problem": plan.kv_problem or None,
    }


def _kv_json(kv: KvPlan | None) -> Mapping[str, Any] | None:
    if kv is None:
        return None
    return {
        **asdict(kv),
        "usable_blocks": kv.usable_blocks,
        "fixed_blocks_per_request": kv.fixed_blocks_per_request,
        "tokens_per_block": kv.tokens_per_block,
        "blocks_per_request": kv.blocks_per_request,
        "requests": round(kv.requests, 3),
    }


def as_text(plan: Plan) -> str:
    return "\n".join(_lines(plan))


def _lines(plan: Plan) -> Iterator[str]:
    profile = plan.launch.profile
    yield f"profile {profile.name}: {profile.summary}"
    yield plan.command
    yield ""
    yield from _stage_lines(plan)
    allowances = ", ".join(_gib(profile.allowance_bytes(stage)) for stage in range(profile.stages))
    yield f"vLLM may take {profile.gpu_memory_utilization:.0%} of a GPU; activations, kernels and graphs are"
    yield f"put at {allowances}, which vLLM replaces by measuring when it starts"
    yield from _no_room_lines(plan)
    pinned, total = _mib(plan.host.pinned_bytes), _gib(plan.host.total_bytes)
    yield f"host RAM: {pinned} pinned for rows, about {total} in all"
    yield ""
    if plan.kv is not None:
        yield from _kv_lines(plan.kv)
    if plan.kv_problem:
        yield f"K/V: {plan.kv_problem}"
    yield ""
    yield from _read_lines(plan.reads, profile)


def _stage_lines(plan: Plan) -> Iterator[str]:
    profile, pipeline = plan.launch.profile, plan.launch.pipeline
    columns = ("weights", "buffers", "reserved", "while loading", "K/V", "left")
    yield f"{'stage':7}{'layers':>8}" + "".join(f"{column:>15}" for column in columns) + "   of a GPU"
    for stage, rank in enumerate(plan.memory):
        layers = pipeline.layers_of(stage)
        sizes: list[int | None] = [
            *(rank.weights_bytes, rank.held_bytes - rank.weights_bytes, rank.reserved_bytes),
            *(rank.peak_allocated_bytes, plan.kv_taken_bytes(stage), plan.left_bytes(stage)),
        ]
        row = f"{stage:<7}{f'{layers.start}-{layers.stop - 1}':>8}"
        row += "".join(f"{'not known' if size is None else _gib(size):>15}" for size in sizes)
        yield f"{row}   {_gib(profile.gpu_memory_bytes)}" + (" table" if stage == pipeline.owner else "")
    for part in dict.fromkeys(part for rank in plan.memory for part in rank.parts):
        yield f"  {part:20}" + "".join(f"{_mib(rank.parts.get(part, 0)):>15}" for rank in plan.memory)
    tightest = max(rank.peak_allocated_bytes for rank in plan.memory)
    if tightest > profile.gpu_memory_bytes:
        yield f"a stage takes {_gib(tightest)} while vLLM repacks its weights, more than such a GPU has:"
        yield "it would not load"


def _no_room_lines(plan: Plan) -> Iterator[str]:
    """By the profile alone: whether there is any room needs no planner."""
    tightest = min(range(len(plan.kv_bytes)), key=plan.kv_bytes.__getitem__)
    if plan.kv_bytes[tightest] > 0:
        return
    profile = plan.launch.profile
    wanted_bytes = plan.memory[tightest].reserved_bytes + profile.allowance_bytes(tightest)
    budget = _gib(profile.budget_bytes)
    yield f"stage {tightest} wants {_gib(wanted_bytes)} with that, and vLLM may take {budget}:"
    yield "no room for K/V, and serve refuses it on such a GPU"


def _read_lines(reads: BytesPerToken, profile: Profile) -> Iterator[str]:
    yield f"a decoded token reads {reads.weights_bytes / 1e9:.3f} GB of weights:"
    for part, size_bytes in sorted(reads.weights.items(), key=lambda item: -item[1]):
        yield f"  {part:20}{size_bytes / 1e6:>12.2f} MB"
    yield f"and {reads.states / 1e6:.1f} MB of recurrent states, read and written; with a long context"
    yield f"besides {reads.selected_kv / 1e6:.1f} MB of selected K/V, and of {profile.max_model_len:,} tokens"
    yield f"{reads.pooled_keys / 1e6:.1f} MB of pooled keys"
    yield (
        f"at most {reads.tokens_per_s(profile.memory_bytes_per_s):,.0f} tokens/s of one stream at "
        f"{profile.memory_bytes_per_s / 1e9:,.0f} GB/s"
    )


def _kv_lines(kv: KvPlan) -> Iterator[str]:
    yield (
        f"K/V by vLLM's planner: blocks of {kv.block_tokens:,} tokens, "
        f"{_mib(max(kv.block_bytes))} each on the widest stage"
    )
    for group in kv.groups:
        grows = "grows with the request" if group.grows else "fixed"
        blocks = f"{group.blocks_per_request:4} blocks of a request"
        yield f"  {group.kind:5}{group.layers:4} caches, {blocks}, {grows}"
    yield (
        f"a request of {kv.max_model_len:,} tokens: {kv.blocks_per_request} blocks, "
        f"{kv.fixed_blocks_per_request} of them whatever its length"
    )
    if kv.pool_blocks:
        yield f"pool: {kv.usable_blocks:,} blocks = {kv.requests:,.2f} such requests"


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.2f} GiB"


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MiB"
