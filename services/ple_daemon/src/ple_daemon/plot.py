"""Pictures of what the tools found. Needs matplotlib."""

from pathlib import Path
from typing import Any

from ple_daemon.errors import DaemonError
from ple_daemon.latency import STALL_MS, octaves
from ple_daemon.probe import Probe
from ple_daemon.simulate import Simulation

_INCHES = (11.0, 4.5)


class PlotError(DaemonError):
    """No picture can be made."""


def check_plotting(path: Path) -> None:
    """Find out before a minute of measuring. Raises PlotError."""
    pyplot = _pyplot()
    if not path.parent.is_dir():
        raise PlotError(f"--plot {path}: no such folder; make it first")
    kinds = sorted(pyplot.figure().canvas.get_supported_filetypes())
    pyplot.close()
    if path.suffix.removeprefix(".").lower() not in kinds:
        raise PlotError(
            f"--plot {path}: no picture of that kind can be made; its name may end in {', '.join(kinds)}"
        )


def plot_probe(probe: Probe, path: Path) -> None:
    """Reads per second by depth, and the latencies of one read at a time."""
    figure, (left, right) = _pyplot().subplots(1, 2, figsize=_INCHES)
    left.plot(list(probe.reads_per_s), list(probe.reads_per_s.values()), marker="o")
    left.set(xscale="log", xlabel="reads at once", ylabel="random 4 KiB reads per second", title=probe.path)
    left.set_xticks(list(probe.reads_per_s), [str(depth) for depth in probe.reads_per_s])
    left.set_ylim(bottom=0)
    rows = octaves(probe.latencies_ns)
    starts = [low / 1e3 for low, *_ in rows]
    right.bar(starts, [count for *_, count in rows], width=starts, align="edge", edgecolor="white")
    right.axvline(STALL_MS, color="tab:red", linestyle="--")
    right.set(
        xscale="log", yscale="log", xlabel="milliseconds", ylabel="reads", title=f"verdict: {probe.verdict}"
    )
    _save(figure, path)


def plot_simulation(simulation: Simulation, path: Path) -> None:
    """Cold pages saved and steps with a cold read, by extra memory: a line a model and kind of token."""
    figure, (left, right) = _pyplot().subplots(1, 2, figsize=_INCHES)
    lines = {(outcome.kind, outcome.model) for outcome in simulation.outcomes if outcome.extra_gib}
    for kind, model in sorted(lines):
        points = sorted(
            (o.extra_gib, o.saved, o.cold_steps)
            for o in simulation.outcomes
            if (o.kind, o.model) == (kind, model)
        )
        sizes, saved, steps = zip(*points, strict=True)
        left.plot(sizes, saved, marker="o", label=f"{kind}: {model}")
        right.plot(sizes, steps, marker="o", label=f"{kind}: {model}")
    left.set(xlabel="extra GiB", ylabel="cold pages saved")
    right.set(xlabel="extra GiB", ylabel="tokens with a cold read")
    left.legend()
    _save(figure, path)


def _pyplot() -> Any:
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise PlotError("--plot needs matplotlib: pip install matplotlib") from error
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def _save(figure: Any, path: Path) -> None:
    try:
        figure.tight_layout()
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise PlotError(f"--plot {path}: {error}") from error
