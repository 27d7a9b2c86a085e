"""Proof that what runs is what the records say: source text before the start, live bindings in the worker."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import cache
from typing import Any

from ple_inference.vllm_plugin.override import Override, OverrideError
from ple_inference.vllm_plugin.overrides import ALL
from ple_inference.vllm_plugin.switches import enabled_overrides
from ple_inference.vllm_plugin.wheel_source import WheelSource

# Below vLLM's own logger, whose handler is the only one in its processes.
_log = logging.getLogger("vllm.triplex")


def install(vllm_config: Any) -> None:
    """Install every enabled override in this worker process, before the model is built."""
    for override in enabled_overrides(vllm_config.additional_config):
        override.install_now()


def prove(vllm_config: Any) -> None:
    """Check source text and live bindings of every enabled override and log one line.

    Raises OverrideError for the first one that does not hold.
    """
    enabled = enabled_overrides(vllm_config.additional_config)
    prove_sources(enabled)
    for override in enabled:
        if not override.live_now():
            raise OverrideError(
                f"triplex: {override.name} was installed and is not live: another plugin may have replaced "
                f"it: try VLLM_PLUGINS=triplex, or switch it off with {override.switch_off}"
            )
    live = [override.name for override in enabled]
    disabled = [override.name for override in ALL if override.name not in live]
    _log.info("overrides live=%s disabled=%s", ",".join(live) or "none", ",".join(disabled) or "none")


def prove_sources(overrides: Iterable[Override], source: WheelSource | None = None) -> None:
    """Compare every symbol's source text with its record. Raises OverrideError for the first mismatch."""
    source = source or _installed()
    for override in overrides:
        for upstream in override.upstream:
            found = source.sha256(upstream.symbol)
            if found != upstream.sha256:
                raise OverrideError(
                    f"triplex: {override.name}: {upstream.symbol} in {source.name} is not what the override "
                    f"was written for (expected {upstream.sha256}, found {found}): install vllm==0.33.0 "
                    f"unmodified, or switch it off with {override.switch_off}"
                )


@cache
def _installed() -> WheelSource:
    return WheelSource.installed()
