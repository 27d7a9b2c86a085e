"""Compares ways of doing one thing: sides take turns in random order, figures are medians."""

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Contest = Mapping[str, Callable[[], object]]


@dataclass(frozen=True, slots=True)
class Figure:
    """One ratio. `bar` says what is expected of it, as ">= 2.5"; `sides` what it was made of."""

    name: str
    value: float
    bar: str
    sides: str

    @property
    def is_met(self) -> bool:
        """Whether the value keeps its bar; a bar of "-" asks for nothing."""
        if self.bar == "-":
            return True
        sign, _, bound = self.bar.partition(" ")
        return self.value >= float(bound) if sign == ">=" else self.value <= float(bound)

    @property
    def _shown(self) -> str:
        """Two digits after the point, or as many as tell the value from its bar."""
        bound = self.bar.rpartition(" ")[2]
        digits = 2
        while not self.is_met and digits < 9 and round(self.value, digits) == float(bound):
            digits += 1
        return f"{self.value:.{digits}f}"

    def __str__(self) -> str:
        miss = "" if self.is_met else "  MISSED"
        return f"{self.name:62} {self._shown:>7} {self.bar:>8}   {self.sides}{miss}"


HEADING = f"{'figure':62} {'value':>7} {'bar':>8}   sides (median)"


def take_turns(
    contest: Contest, rounds: int, prepare: Callable[[], object] = lambda: None
) -> dict[str, float]:
    """Median seconds of each side; `prepare` runs untimed before every turn."""
    times: dict[str, list[float]] = {side: [] for side in contest}
    for _ in range(rounds):
        for side in random.sample(list(contest), len(contest)):
            prepare()
            start_s = time.perf_counter()
            contest[side]()
            times[side].append(time.perf_counter() - start_s)
    return {side: statistics.median(taken) for side, taken in times.items()}


def ratio(name: str, slow: tuple[str, float], fast: tuple[str, float], bar: str) -> Figure:
    """The first side's seconds over the second's."""
    sides = f"{slow[0]} {slow[1] * 1e3:.3f} ms, {fast[0]} {fast[1] * 1e3:.3f} ms"
    return Figure(name, slow[1] / fast[1], bar, sides)
