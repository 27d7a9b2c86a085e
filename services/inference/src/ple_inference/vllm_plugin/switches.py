"""Which overrides are on, from vLLM's --additional-config '{"triplex": {"disable": ["name"]}}'."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ple_inference.vllm_plugin.override import Override, OverrideError
from ple_inference.vllm_plugin.overrides import ALL


def enabled_overrides(additional_config: object, overrides: Sequence[Override] = ALL) -> tuple[Override, ...]:
    """The overrides that are not switched off, in order.

    Raises OverrideError for a malformed or unknown switch, and when one that is on requires one that is off.
    """
    disabled = _disabled_names(additional_config)
    known = [override.name for override in overrides]
    for name in disabled:
        if name not in known:
            raise OverrideError(
                f"triplex: there is no override {name!r} to disable: known are {', '.join(known)}"
            )
    enabled = tuple(override for override in overrides if override.name not in disabled)
    for override in enabled:
        for name in override.requires:
            if name in disabled:
                raise OverrideError(
                    f"triplex: {override.name} requires {name}, which is disabled: "
                    f"disable {override.name} as well, or neither"
                )
    return enabled


def switch_off(override: Override, overrides: Sequence[Override] = ALL) -> str:
    """The argument of `vllm serve` that leaves out `override` and what requires it."""
    names = [override.name]
    for name in names:
        names += [other.name for other in overrides if name in other.requires and other.name not in names]
    return f"--additional-config '{json.dumps({'triplex': {'disable': names}})}'"


def _disabled_names(additional_config: object) -> list[str]:
    options = triplex_options(additional_config)
    names = options.get("disable", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise OverrideError(
            f"triplex: in --additional-config, triplex.disable must be a list of names, not {names!r}"
        )
    return names


def triplex_options(additional_config: object) -> dict[str, Any]:
    """What `--additional-config` says under "triplex"; empty without it."""
    options = additional_config.get("triplex", {}) if isinstance(additional_config, dict) else {}
    if not isinstance(options, dict):
        raise OverrideError(f"triplex: in --additional-config, triplex must be an object, not {options!r}")
    return options
