"""What `make run` says: one line an event, with the seconds since the start."""

import sys
import time


class Console:
    """Lines on standard output, flushed at once so that a pipe sees them too."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    def line(self, text: str) -> None:
        print(f"[{time.monotonic() - self._started:6.1f} s] {text}", flush=True)

    def block(self, *lines: str) -> None:
        print("", *lines, "", sep="\n", flush=True)

    def error(self, text: str) -> None:
        print(f"triplex: {text}", file=sys.stderr, flush=True)
