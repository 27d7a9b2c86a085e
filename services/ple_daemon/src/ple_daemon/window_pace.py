"""How many rows a prefetch window has: what is in flight is what a decode step that arrives must wait for.

On a drive of 100,000 reads a second a window of 64 rows is over in less than a millisecond; on one of 10,000
it takes six, and a decode step, itself three, would wait for two such windows. Fewer rows keep a slow drive
as busy, since it is slow at every depth. Where more depth means more reads, a window is fast and stays large.
"""

MAX_ROWS = 64
MIN_ROWS = 16
_SLOW_S = 0.002
_FAST_S = 0.0007


class WindowPace:
    """Halves windows that take long and doubles those that do not."""

    def __init__(self) -> None:
        self.rows = MAX_ROWS

    def took(self, rows: int, seconds: float) -> None:
        """A window of `rows` was waited for; a smaller one than asked for says nothing."""
        if rows < self.rows:
            return
        if seconds > _SLOW_S:
            self.rows = max(MIN_ROWS, self.rows // 2)
        elif seconds < _FAST_S:
            self.rows = min(MAX_ROWS, self.rows * 2)
