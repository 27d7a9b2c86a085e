"""How tests wait: for a condition, with a deadline, never for a time."""

import time
from collections.abc import Callable


def wait_for(
    condition: Callable[[], object], what: str, deadline_s: float = 60.0, poll_s: float = 0.02
) -> object:
    """The first true value of `condition`; fails at the deadline."""
    deadline = time.monotonic() + deadline_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"no {what} within {deadline_s} s"
        time.sleep(poll_s)
    return found
