"""What happened lately, for the status page: codes and times, never anything of a prompt."""

import re
import statistics
import time
from collections import deque
from dataclasses import dataclass

_CODE = re.compile(r"[a-z0-9_]{1,40}")
_KEPT = 50
_KEPT_FIRST_TOKENS = 200
_FIRST_TOKENS_FOR_S = 900.0


@dataclass(frozen=True)
class RecentError:
    """One request that failed."""

    at_s: float  # Unix time
    route: str
    status: int
    code: str


class Recent:
    """The last errors, and the first-token times of the last quarter of an hour."""

    def __init__(self) -> None:
        self._errors: deque[RecentError] = deque(maxlen=_KEPT)
        self._first_tokens: deque[tuple[float, float]] = deque(maxlen=_KEPT_FIRST_TOKENS)

    @property
    def errors(self) -> list[RecentError]:
        """Newest first."""
        return list(reversed(self._errors))

    def note_error(self, route: str, status: int, code: str) -> None:
        """Remember a failure; an engine's own codes may be anything and are not repeated."""
        known = code if _CODE.fullmatch(code) else "other"
        self._errors.append(RecentError(time.time(), route, status, known))

    def note_first_token(self, seconds: float) -> None:
        """Remember how long a stream's client waited."""
        self._first_tokens.append((time.monotonic(), seconds))

    def first_token_s(self) -> tuple[float, float] | None:
        """Median and 95th percentile; None when there were no streams lately."""
        oldest_s = time.monotonic() - _FIRST_TOKENS_FOR_S
        seconds = sorted(taken for at_s, taken in self._first_tokens if at_s >= oldest_s)
        if not seconds:
            return None
        return statistics.median(seconds), seconds[min(len(seconds) - 1, round(0.95 * (len(seconds) - 1)))]
