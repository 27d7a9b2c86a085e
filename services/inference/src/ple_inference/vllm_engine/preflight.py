"""What can be known before tens of gigabytes are loaded."""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping, Sequence

from ple_inference.host_ram import available_bytes
from ple_inference.settings import split_address
from ple_inference.vllm_engine.gpus import Gpu, visible_gpus
from ple_inference.vllm_engine.host_memory import HostMemory
from ple_inference.vllm_engine.launch import Launch
from ple_inference.vllm_engine.profile import GIB
from ple_inference.vllm_engine.rank_memory import RankMemory, rank_memories
from ple_inference.vllm_engine.refused import Refused
from ple_inference.vllm_engine.stored_values import check_values
from ple_inference.vllm_engine.table_gate import await_table
from ple_inference.vllm_engine.vllm_arguments import refuse_environment
from ple_inference.vllm_plugin.override import OverrideError
from ple_inference.vllm_plugin.proof import prove_sources
from ple_inference.vllm_plugin.switches import enabled_overrides
from ple_inference.vllm_plugin.wheel_source import SourceMissing

_log = logging.getLogger(__name__)
# CUDA's context and modules of a worker, on the low side: no machine is refused that would do.
_CONTEXT_BYTES = 300 * 2**20


def check(launch: Launch, environ: Mapping[str, str]) -> None:
    """Quick checks first, the wait for the daemon last. Raises Refused, CheckpointError."""
    refuse_environment(environ)
    _check_plugin(launch)
    _check_port(launch.settings.http_address)
    if not (launch.checkpoint.path / "tokenizer.json").is_file():
        raise Refused(f"{launch.checkpoint.path} has no tokenizer.json, and nothing is served without one")
    check_values(launch.tensors, launch.checkpoint.text, written=True)
    memory = rank_memories(launch.rank_modules(), launch.checkpoint.text, launch.load_options)
    _check_gpus(launch, memory, visible_gpus(environ.get("CUDA_VISIBLE_DEVICES")))
    _check_host_memory(HostMemory.of(launch))
    pipeline = launch.pipeline
    _log.info(
        "pipeline layers=%s table_stage=%d table_layer=%d",
        ",".join(map(str, pipeline.partition)),
        pipeline.owner,
        pipeline.ple_layer,
    )
    await_table(
        launch.settings.table_address,
        launch.settings.table_wait_deadline_s,
        launch.checkpoint,
        launch.tensors,
    )


def _check_plugin(launch: Launch) -> None:
    try:
        prove_sources(enabled_overrides(launch.table.additional_config))
    except (OverrideError, SourceMissing) as error:
        raise Refused(str(error)) from error


def _check_port(address: str) -> None:
    host, port = split_address(address)
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise Refused(
                f"cannot listen on {address}: {error.strerror}; choose another --http-address"
            ) from error


def _check_gpus(launch: Launch, memory: Sequence[RankMemory], gpus: Sequence[Gpu]) -> None:
    stages = launch.pipeline.stages
    if len(gpus) < stages:
        raise Refused(f"{stages} pipeline stages need {stages} GPUs and {len(gpus)} can be seen; give --pp")
    for stage, (gpu, rank) in enumerate(zip(gpus, memory, strict=False)):
        budget_bytes = int(gpu.total_bytes * launch.profile.gpu_memory_utilization)
        needed_bytes = rank.reserved_bytes + launch.profile.allowance_bytes(stage)
        if needed_bytes >= budget_bytes:
            raise Refused(
                f"stage {stage} has {_gib(rank.weights_bytes)} of weights and wants {_gib(needed_bytes)} "
                f"with activations, before any K/V; GPU {gpu.index} ({gpu.name}) gives {_gib(budget_bytes)} "
                f"of {_gib(gpu.total_bytes)}: use more stages (--pp), larger GPUs, a smaller checkpoint, or "
                "after the -- a larger --gpu-memory-utilization or a smaller --max-num-batched-tokens"
            )
        if rank.peak_allocated_bytes + _CONTEXT_BYTES > gpu.total_bytes:
            raise Refused(
                f"stage {stage} takes {_gib(rank.peak_allocated_bytes)} while vLLM repacks its weights; "
                f"GPU {gpu.index} ({gpu.name}) has {_gib(gpu.total_bytes)}, {_gib(_CONTEXT_BYTES)} of it for "
                "CUDA: use more stages (--pp) or larger GPUs"
            )
        if gpu.free_bytes < budget_bytes:
            raise Refused(
                f"GPU {gpu.index} ({gpu.name}) has {_gib(gpu.free_bytes)} free and vLLM will take "
                f"{_gib(budget_bytes)}: end what uses it, or give -- --gpu-memory-utilization"
            )


def _check_host_memory(memory: HostMemory) -> None:
    available = available_bytes()
    if available < memory.total_bytes:
        raise Refused(
            f"{_gib(available)} of RAM are available, vLLM's {memory.processes} processes want about "
            f"{_gib(memory.total_bytes)}, {_gib(memory.pinned_bytes)} of it pinned; free some"
        )


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.2f} GiB"
