"""docs/overrides.md, written from the records."""

from __future__ import annotations

from collections.abc import Sequence

from ple_inference.vllm_plugin.override import Override
from ple_inference.vllm_plugin.switches import switch_off

_HEAD = """\
# What Triplex changes in vLLM

<!-- Made by `make overrides-doc` from services/inference/src/ple_inference/vllm_plugin/overrides/. -->

vLLM 0.33.0 is installed unmodified. Each change to it is one *override*: one file with one record, from which
this page, the switches, the check at start and the contract tests are made. A worker starts only when every
override that is on is in effect, and when vLLM's source text is what the override was written for; it then
logs `overrides live=... disabled=...`.
"""

_ADDING = """
## How to add an override

1. Take the highest rung that works: a setting, a registry, `register_oot`, `get_model_state_cls`, the worker
   and runner classes, a name inside `vllm.models.qwen4_exp`. Code that other models share is patched only
   when there is no other way, and the record says so.
2. Write `overrides/<name>.py` with `OVERRIDE`, and list it in `ALL` in `overrides/__init__.py`. It imports
   neither vllm nor torch at its top. `install` may run twice in a process; `is_live` looks at what vLLM will
   call.
3. Name every symbol that it replaces or relies on. `python -m ple_inference.vllm_plugin sha256 WHEEL
   SYMBOL...` prints the entries. Read the source first: the hash says that you have.
4. `make overrides-doc`, and a test of the behaviour with the override on and off.

For a new release of vLLM: `make vllm-diff OLD=0.33.0 NEW=...` shows what to read again.
"""


def markdown(overrides: Sequence[Override]) -> str:
    """The page: a table, then a section for each override."""
    rows = [
        f"| [`{it.name}`](#{it.name}) | {it.summary} | {_places(it)} | {len(it.upstream)} |"
        for it in overrides
    ]
    table = ["| override | what it does | where | symbols |", "|---|---|---|---|", *rows]
    sections = [_section(override, overrides) for override in overrides]
    return "\n".join([_HEAD, *table, *sections, _ADDING])


def _section(override: Override, overrides: Sequence[Override]) -> str:
    facts = {
        "Why": override.why,
        "Without it": override.without_it,
        "Switch off": f"`{switch_off(override, overrides)}`",
        "Requires": ", ".join(f"`{name}`" for name in override.requires) or "nothing",
        "Remove when": override.remove_when,
    }
    symbols = [
        f"| {upstream.role.replace('_', ' ')} | `{upstream.symbol}` | `{upstream.sha256[:16]}` |"
        for upstream in override.upstream
    ]
    return "\n".join(
        [
            f"\n## {override.name}\n",
            *(f"- **{title}.** {text}" for title, text in facts.items()),
            "\n| role | symbol | SHA-256 of its source, first 16 digits |\n|---|---|---|",
            *symbols,
        ]
    )


def _places(override: Override) -> str:
    return ", ".join(place.replace("_", " ") for place in override.places)
