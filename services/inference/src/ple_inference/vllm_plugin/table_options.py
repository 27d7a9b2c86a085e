"""Where the worker finds the table, from vLLM's --additional-config '{"triplex": {"table": ADDRESS}}'."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ple_inference.vllm_plugin.override import OverrideError

SLOTS = 4
"""Of the region shared with the daemon: steps whose rows may be on their way at once."""


@dataclass(frozen=True)
class TableOptions:
    table: str
    """Address of the daemon, as `ple_rpc.client.TableClient` takes it."""
    table_wait_s: float = 120.0
    """How long the worker waits for the daemon once the model is loaded."""
    lookup_deadline_s: float = 60.0
    """How long a step waits for its rows, restarts of the daemon included, before the engine ends."""
    wait_file: str | None = None
    """Where the worker notes that a lookup waits: see `table_wait.py`."""

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> TableOptions:
        """What `triplex` in --additional-config says. Raises OverrideError."""
        given = {name: value for name, value in options.items() if name != "disable"}
        unknown = set(given) - set(cls.__dataclass_fields__)
        if unknown:
            known = ", ".join(sorted({*cls.__dataclass_fields__, "disable"}))
            raise OverrideError(
                f"triplex: in --additional-config, triplex.{min(unknown)} is not known: known are {known}"
            )
        address = given.get("table")
        if not isinstance(address, str) or not address:
            raise OverrideError(
                "triplex: in --additional-config, triplex.table must name the daemon, as "
                '{"triplex": {"table": "unix:/run/triplex/table.sock"}}'
            )
        for name in ("table_wait_s", "lookup_deadline_s"):
            value = given.get(name, 1.0)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 86_400:
                raise OverrideError(f"triplex: triplex.{name} must be seconds, not {value!r}")
        if not isinstance(given.get("wait_file", ""), str):
            raise OverrideError(f"triplex: triplex.wait_file must be a path, not {given['wait_file']!r}")
        return cls(**given)
