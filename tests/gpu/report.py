"""Lines of the table, out of what the scenarios found."""

from __future__ import annotations

from typing import Any

from compare import agreement, answers_agreement

Found = dict[str, Any]
_SHOWN = (
    "rows_checked", "owners", "table_pages_read_by_loading", "block_size", "kills_unchecked", "kills", "soak",
    "table", "memory_gib", "ended_by_itself",
)  # fmt: skip

_EVENT = ("waits_for_the_record_before", "later_records_do_not_count")


def outputs(one: Found, several: Found, theirs: Found, pp: int) -> list[str]:
    """Of engines with one and with `pp` stages, and of Transformers."""
    name = f"pp={pp}"
    lines = [*failure("pp=1", one), *failure(name, several), *failure("Transformers", theirs)]
    pairs = (
        ("pp=1 / Transformers", one, theirs, "prompt"),
        (f"{name} / pp=1", several, one, "prompt"),
        (f"{name} / Transformers", several, theirs, "prompt"),
        ("pp=1 / Transformers, scrambled table", one, theirs, "scrambled"),
    )
    lines += [
        line(label, agreement(a["prompt"], b[key]))
        for label, a, b, key in pairs
        if "prompt" in a and key in b
    ]
    for label, found in (("pp=1", one), (name, several)):
        lines += _greedy(label, found)
        lines += [line(f"{label} {key}", found[key]) for key in _SHOWN if key in found]
    if "alone" in one and "alone" in several:
        lines.append(line(f"{name} / pp=1 greedy", answers_agreement(several["alone"], one["alone"])))
    return lines


def cost(found: Found) -> list[str]:
    lines = failure("lookup cost", found)
    for tokens, parts in found.get("parts_us", {}).items():
        rounded = {key: round(value, 1) for key, value in parts.items()}
        lines.append(line(f"delivery of {tokens} tokens, us", rounded))
    for streams in (1, 4):
        step = found.get(f"streams_{streams}")
        if step is not None:
            value = f"{step['ratio']:.3f} ({step['daemon_ms']:.3f} ms, {step['pinned_ms']:.3f} ms)"
            lines.append(line(f"decode step, {streams} streams, daemon / pinned", value))
    lines += [line(key, found[key]) for key in ("kills", "rows_checked", "table") if key in found]
    return lines


def event(found: Found) -> list[str]:
    """What a captured wait waits for: the plugin's rows depend on it."""
    lines = failure("external event", found)
    return lines + [line(f"external event {key}", value) for key, value in found.items() if key in _EVENT]


def cold(found: Found) -> list[str]:
    lines = failure("cold prompt", found)
    if "ratio" in found:
        lines.append(line("cold prompt, first token without / with hints", f"{found['ratio']:.2f}"))
        lines += [line(f"cold prompt {key}", found[key]) for key in ("seconds", "cached_before", "pages")]
    return lines


def _greedy(label: str, found: Found) -> list[str]:
    return [
        line(f"{label} greedy, alone / {key}", answers_agreement(found["alone"], found[key]))
        for key in ("again", "together")
        if key in found
    ]


def failure(label: str, found: Found) -> list[str]:
    """Why a scenario ended without findings; nothing when it did not."""
    if "error" not in found:
        return []
    return [line(label, found["error"]), *(f"    {line[:300]}" for line in found["tail"])]


def line(label: str, value: object) -> str:
    return f"{label:52} {value}"
