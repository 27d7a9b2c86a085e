"""The command line and environment that a profile becomes, and which other arguments may join them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ple_inference.settings import Settings, split_address
from ple_inference.vllm_engine.pipeline import Pipeline
from ple_inference.vllm_engine.profile import Profile
from ple_inference.vllm_engine.refused import Refused

WORKER = "ple_inference.vllm_plugin.worker.TriplexWorker"
MIDDLEWARE = "ple_inference.vllm_engine.middleware.TriplexMiddleware"
# Longer than every deadline inside a step, the table's included.
_EXECUTE_DEADLINE_S = 300

_OURS = {
    "--model": "give --model before the --",
    "--served-model-name": "give --served-model-name before the --",
    "--host": "give --http-address before the --",
    "--port": "give --http-address before the --",
    "--uds": "give --http-address before the --",
    "--pipeline-parallel-size": "give --pp before the --",
    "-pp": "give --pp before the --",
    "--worker-cls": "the plugin's worker is needed",
    "--additional-config": "give --disable NAME before the -- to switch an override off",
    "--config": "a file could set what is checked here; give its arguments one by one",
    "--mamba-cache-mode": "vLLM 0.33.0 ignores it; it follows --[no-]enable-prefix-caching",
    "--speculative-config": "speculative decoding (MTP) is not built yet",
    "-sc": "speculative decoding (MTP) is not built yet",
}
_MUST_BE_ONE = {
    "--tensor-parallel-size": "tensor parallelism (TP > 1)",
    "-tp": "tensor parallelism (TP > 1)",
    "--data-parallel-size": "data parallelism (DP > 1)",
    "-dp": "data parallelism (DP > 1)",
    "--decode-context-parallel-size": "context parallelism",
    "-dcp": "context parallelism",
    "--prefill-context-parallel-size": "context parallelism",
    "-pcp": "context parallelism",
    "--nnodes": "more than one machine",
    "-n": "more than one machine",
}
# argparse takes any unambiguous beginning of a name; shorter ones than this it finds ambiguous.
_SHORTEST_ABBREVIATION = len("--mode")


@dataclass(frozen=True)
class TableAccess:
    """What a worker is told about the table, beside which overrides are off."""

    address: str
    wait_file: Path
    lookup_deadline_s: float
    disabled: tuple[str, ...] = ()

    @property
    def additional_config(self) -> dict[str, Any]:
        triplex: dict[str, Any] = {
            "table": self.address,
            "lookup_deadline_s": self.lookup_deadline_s,
            "wait_file": str(self.wait_file),
        }
        return {"triplex": triplex | ({"disable": list(self.disabled)} if self.disabled else {})}


def vllm_arguments(
    settings: Settings, profile: Profile, table: TableAccess, extra: Sequence[str]
) -> tuple[str, ...]:
    """Arguments of `vllm`, the user's last so that they count. Raises Refused for one that cannot."""
    refuse_unserved(extra)
    if settings.lookup_deadline_s >= _EXECUTE_DEADLINE_S:
        raise Refused(
            f"lookup_deadline_s is {settings.lookup_deadline_s:g}; vLLM ends a step after "
            f"{_EXECUTE_DEADLINE_S} s, so give less"
        )
    host, port = split_address(settings.http_address)
    compilation = {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": list(profile.capture_sizes),
    }
    return (
        *("serve", str(settings.model)),
        *("--served-model-name", settings.model_name),
        *("--host", host, "--port", str(port)),
        *("--pipeline-parallel-size", str(profile.stages)),
        *("--max-model-len", str(profile.max_model_len)),
        *("--max-num-seqs", str(profile.max_num_seqs)),
        *("--max-num-batched-tokens", str(profile.max_num_batched_tokens)),
        *("--gpu-memory-utilization", str(profile.gpu_memory_utilization)),
        *("--kv-cache-dtype", profile.kv_cache_dtype),
        "--enable-prefix-caching" if profile.prefix_caching else "--no-enable-prefix-caching",
        # FlashInfer's kernel would take one more block of each state group, and compile at the first prompt.
        *("--gdn-prefill-backend", "triton"),
        *("--compilation-config", _json(compilation)),
        *("--limit-mm-per-prompt", _json({"image": profile.max_images, "video": 0})),
        *("--mm-processor-kwargs", _json({"max_pixels": profile.max_image_px})),
        *("--reasoning-parser", "qwen3", "--enable-auto-tool-choice", "--tool-call-parser", "qwen3_coder"),
        *("--shutdown-timeout", str(round(settings.drain_deadline_s))),
        *("--worker-cls", WORKER),
        *("--middleware", MIDDLEWARE),
        *("--additional-config", _json(table.additional_config)),
        *extra,
    )


def vllm_environment(pipeline: Pipeline) -> dict[str, str]:
    """What vLLM takes from the environment only."""
    return {
        "VLLM_PP_LAYER_PARTITION": ",".join(map(str, pipeline.partition)),
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": str(_EXECUTE_DEADLINE_S),
        # Its import compiles kernels.
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }


def refuse_environment(environ: Mapping[str, str]) -> None:
    """Raises Refused for what would make vLLM another engine than the one that is checked."""
    if environ.get("VLLM_USE_V2_MODEL_RUNNER", "").strip() == "0":
        raise Refused("VLLM_USE_V2_MODEL_RUNNER=0 asks for vLLM's V1 runner, which is not served; unset it")
    plugins = environ.get("VLLM_PLUGINS")
    if plugins is not None and "triplex" not in plugins.split(","):
        raise Refused(f"VLLM_PLUGINS={plugins} leaves the triplex plugin out; add it or unset the variable")


def refuse_unserved(extra: Sequence[str]) -> None:
    """Raises Refused for an argument that the launcher sets itself or that is not served."""
    for position, argument in enumerate(extra):
        if not argument.startswith("-"):
            continue
        flag, _, value = argument.partition("=")
        name = flag.replace("_", "-").partition(".")[0]
        if ours := _lookup(_OURS, name):
            raise Refused(f"{argument}: {ours}")
        if one := _lookup(_MUST_BE_ONE, name):
            given = value or "".join(extra[position + 1 : position + 2])
            if given != "1":
                raise Refused(f"{flag} {given}: {one} is not served; use more pipeline stages (--pp)")
        elif name.startswith(("--spec", "--data-parallel", "-dp")):
            raise Refused(f"{argument}: neither speculative decoding (MTP) nor data parallelism is served")


def _lookup(known: Mapping[str, str], name: str) -> str | None:
    if name in known:
        return known[name]
    if not name.startswith("--") or len(name) < _SHORTEST_ABBREVIATION:
        return None
    return next((known[flag] for flag in known if flag.startswith(name)), None)


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))
