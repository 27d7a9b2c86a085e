"""One line per event on stderr: `time level service message key=value`; never prompt text or token ids."""

import logging
import sys
import time


def configure(level: str) -> None:
    """Send everything that is logged to stderr as lines."""
    formatter = logging.Formatter(
        "%(asctime)s.%(msecs)03dZ %(levelname)s ple-gateway %(message)s", "%Y-%m-%dT%H:%M:%S"
    )
    formatter.converter = time.gmtime
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # Each would write a line per request, beside our own access line.
    for name in ("uvicorn.error", "uvicorn.access", "asyncio"):
        logging.getLogger(name).setLevel(logging.WARNING)
