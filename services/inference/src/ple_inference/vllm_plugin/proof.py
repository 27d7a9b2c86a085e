"""Proof that what runs is what the records say: source text before the start, live bindings in the worker."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import asdict
from functools import cache
from typing import Any

from ple_inference.vllm_plugin.override import Override, OverrideError
from ple_inference.vllm_plugin.overrides import ALL
from ple_inference.vllm_plugin.switches import enabled_overrides, switch_off
from ple_inference.vllm_plugin.wheel_source import SourceMissing, WheelSource

# Below vLLM's own logger, whose handler is the only one in its processes.
_log = logging.getLogger("vllm.triplex")

_INSTALL = "install vllm==0.33.0, unmodified"


def install(vllm_config: Any) -> None:
    """Install every enabled override in this worker process, before the model is built.

    Raises OverrideError, with nothing installed, when vLLM's source text is not what they were written for.
    """
    enabled = enabled_overrides(vllm_config.additional_config)
    prove_sources(enabled)
    for override in enabled:
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
                f"it: try VLLM_PLUGINS=triplex, or switch it off with {switch_off(override)}"
            )
    live = [override.name for override in enabled]
    disabled = [override.name for override in ALL if override.name not in live]
    _log.info("overrides live=%s disabled=%s", ",".join(live) or "none", ",".join(disabled) or "none")


def prove_sources(overrides: Iterable[Override], source: WheelSource | None = None) -> None:
    """Compare every symbol's source text with its record. Raises OverrideError for the first mismatch."""
    source = source or _installed()
    for override in overrides:
        for upstream in override.upstream:
            try:
                found = source.sha256(upstream.symbol)
            except SourceMissing as missing:
                raise OverrideError(f"triplex: {override.name}: {missing}: {_INSTALL}") from missing
            if found != upstream.sha256:
                raise OverrideError(
                    f"triplex: {override.name}: {upstream.symbol} in {source.name} is not what the override "
                    f"was written for (expected {upstream.sha256}, found {found}): {_INSTALL}, or switch the "
                    f"override off with {switch_off(override)}"
                )


def report(additional_config: object, source: WheelSource | None = None) -> list[dict[str, Any]]:
    """What each override changes and whether it is on, ready for JSON: /v1/triplex/overrides.

    `live` is null for an override that no front end uses: a worker that started has proven those.
    """
    source = source or _installed()
    enabled = enabled_overrides(additional_config)
    return [_describe(override, override in enabled, source) for override in ALL]


def _describe(override: Override, enabled: bool, source: WheelSource) -> dict[str, Any]:
    here = enabled and "front_end" in override.places
    upstream = []
    for symbol in override.upstream:
        found = _found_sha256(symbol.symbol, source)
        matches = found == symbol.sha256
        upstream.append({**asdict(symbol), "found_sha256": found, "matches": matches})
    return {
        "name": override.name,
        "summary": override.summary,
        "enabled": enabled,
        "live": override.live_now() if here else None,
        "places": list(override.places),
        "requires": list(override.requires),
        "why": override.why,
        "without_it": override.without_it,
        "switch_off": switch_off(override),
        "remove_when": override.remove_when,
        "upstream": upstream,
    }


def _found_sha256(symbol: str, source: WheelSource) -> str | None:
    try:
        return source.sha256(symbol)
    except SourceMissing:
        return None


@cache
def _installed() -> WheelSource:
    return WheelSource.installed()
