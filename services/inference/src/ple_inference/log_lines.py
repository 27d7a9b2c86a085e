"""One line per event: time, level, service, message, key=value."""

from __future__ import annotations

import logging
import sys
import time


def log_to_stderr(level: str) -> None:
    """Set the process's logging up."""
    formatter = logging.Formatter(
        "%(asctime)s.%(msecs)03dZ %(levelname)s ple-inference %(message)s", datefmt="%Y-%m-%dT%H:%M:%S"
    )
    formatter.converter = time.gmtime
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # One line a request of theirs would say what ours say.
    for name in ("uvicorn.access", "httpx", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
