"""Lines of the table about quantized checkpoints, and what was asked of them beforehand."""

from __future__ import annotations

from typing import Any

from compare import Agreement, agreement, answers_agreement
from loaded_memory import TOLERANCE, compare
from report import failure, line

Found = dict[str, Any]
MEDIAN, P999, NEAR_TIE = 0.02, 0.15, 0.2
"""Of log-probabilities against decoded weights. vLLM rounds scales from fp16 to bf16 and multiplies in bf16,
the reference rounds their product once: about twice what bf16 alone was seen to leave (0.008 and 0.063)."""
__all__ = ["answers", "endings", "failure", "line", "linears", "memory", "pinned", "stages"]


def answers(quant: str, ours: dict[int, Found], theirs: Found) -> list[str]:
    lines = failure(f"{quant}, Transformers", theirs)
    for pp, found in ours.items():
        lines += failure(f"{quant}, PP={pp}", found)
        if "prompt" in found and "prompt" in theirs:
            lines += _judged(
                f"{quant}, PP={pp} / decoded", agreement(found["prompt"], theirs["prompt"], NEAR_TIE)
            )
        for key in ("kernels", "step_ms"):
            if key in found:
                lines.append(line(f"{quant}, PP={pp} {key}", found[key]))
    one = ours[1]
    for pp, found in ours.items():
        if pp > 1 and "alone" in found and "alone" in one:
            lines += _judged(f"{quant}, PP={pp} / PP=1", agreement(found["prompt"], one["prompt"], NEAR_TIE))
            lines.append(
                line(f"{quant}, PP={pp} / PP=1 greedy", answers_agreement(found["alone"], one["alone"]))
            )
    if "scrambled" in theirs and "prompt" in one:
        shifted = agreement(one["prompt"], theirs["scrambled"], NEAR_TIE)
        lines.append(line(f"{quant}, PP=1 / decoded, shifted table", shifted))
    return lines


def _judged(label: str, found: Agreement) -> list[str]:
    within = (
        found.median_difference <= MEDIAN and found.p999_difference <= P999 and not found.parted_elsewhere
    )
    bar = f"median <= {MEDIAN}, p99.9 <= {P999}, none parts by more than {NEAR_TIE}"
    return [line(label, found), line(f"    {bar}", "kept" if within else "MISSED")]


def memory(label: str, predicted: list[Found], measured: list[Found]) -> list[str]:
    """Allocated and reserved are held against the bar; peaks are shown beside their prediction."""
    lines = []
    for rank, (expected, found) in enumerate(zip(predicted, measured, strict=False)):
        for name, part in compare(expected, found).items():
            words = f"{found[name]:,} measured, {expected[name]:,} predicted, {part:+.2%}"
            if not name.startswith("peak"):
                words += " kept" if abs(part) <= TOLERANCE else " MISSED"
            lines.append(line(f"{label} rank {rank} {name}", words))
        weights = f"{found['weights_bytes']:,} of parameters, {expected['weights_bytes']:,} predicted"
        lines.append(line(f"{label} rank {rank} weights_bytes", weights))
    return lines


def endings(found: dict[str, Found]) -> list[str]:
    lines = []
    whole = found["whole"].get("prompt")
    for label, case in found.items():
        if "ended" in case:
            lines.append(line(label, case["ended"][:400]))
        elif whole is not None:
            lines.append(line(label, f"starts; / whole: {agreement(case['prompt'], whole, NEAR_TIE)}"))
        else:
            lines.append(line(label, "starts"))
    return lines


def stages(found: dict[str, Found]) -> list[str]:
    lines = []
    for label, case in found.items():
        if "memory" in case:
            sizes = ", ".join(f"{rank['allocated_bytes']:,}" for rank in case["memory"])
            lines.append(line(f"{label}, allocated bytes", sizes))
        lines.append(line(label, case["ended"][:400] if "ended" in case else "answers"))
    return lines


def pinned(found: Found) -> list[str]:
    lines = failure("pinned memory", found)
    shown = (key for key in ("size_bytes", "waste_bytes", "pool", "torch") if key in found)
    return lines + [line(f"pinned memory {key}", found[key]) for key in shown]


def linears(found: Found) -> list[str]:
    lines = failure("linears", found)
    for name, shape in found.items():
        if isinstance(shape, dict) and "us" in shape:
            lines.append(line(f"{name}, us", {key: round(value, 2) for key, value in shape["us"].items()}))
            lines.append(line(f"{name}, kernels", shape["kernels"]))
            errors = {key: [f"{value:.1e}" for value in values] for key, values in shape["errors"].items()}
            lines.append(line(f"{name}, error at 1 and 17 tokens", errors))
    return lines
