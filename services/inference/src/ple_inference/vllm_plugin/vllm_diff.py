"""What changed between two releases of vLLM in the symbols that the overrides name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from ple_inference.vllm_plugin.override import Override
from ple_inference.vllm_plugin.wheel_source import SourceMissing, WheelSource


@dataclass(frozen=True)
class Change:
    """One symbol, who names it, and its unified diff where its text changed."""

    symbol: str
    overrides: tuple[str, ...]
    verdict: Literal["same", "changed", "gone"]
    diff: str = ""


def changes(old: WheelSource, new: WheelSource, overrides: Iterable[Override]) -> Iterator[Change]:
    """Each symbol once, in the order of the records. Raises SourceMissing when `old` has not got it."""
    users: dict[str, list[str]] = {}
    for override in overrides:
        for upstream in override.upstream:
            users.setdefault(upstream.symbol, []).append(override.name)
    for symbol, names in users.items():
        yield _change(symbol, tuple(names), old, new)


def _change(symbol: str, names: tuple[str, ...], old: WheelSource, new: WheelSource) -> Change:
    before = old.text(symbol)
    try:
        after = new.text(symbol)
    except SourceMissing:
        return Change(symbol, names, "gone")
    if before == after:
        return Change(symbol, names, "same")
    lines = difflib.unified_diff(
        before.splitlines(), after.splitlines(), f"{old.name} {symbol}", f"{new.name} {symbol}", lineterm=""
    )
    return Change(symbol, names, "changed", "\n".join(lines))
