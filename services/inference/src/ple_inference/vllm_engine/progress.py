"""Whether a running vLLM engine lives and gets on, as its API server can see it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from ple_inference.vllm_plugin.table_wait import TableWait

STALL_S = 90.0
"""Longer than a lookup may take, shorter than what the gateway waits between tokens."""


class EngineSigns(Protocol):
    """What is known without asking the engine's process, whose answer would queue behind its step."""

    @property
    def dead(self) -> bool: ...

    @property
    def unfinished(self) -> int:
        """Requests that were taken and not answered to the end."""
        ...


class Progress:
    """Keeps when the engine last got on; `look` must be called every second or so.

    Each step ends one lookup, and the worker counts them in a file. Without that file only death can be told:
    a long prompt gives no token for minutes and is no stall.
    """

    def __init__(
        self,
        signs: EngineSigns,
        wait_file: Path | None,
        *,
        stall_s: float = STALL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._signs, self._wait_file = signs, wait_file
        self._stall_s, self._clock = stall_s, clock
        self._wait: TableWait | None = None
        self._lookups = 0
        self._moved_s = clock()

    def look(self) -> None:
        wait, now_s = self._file(), self._clock()
        if wait is None or not self._signs.unfinished or wait.waiting_since_s is not None:
            self._moved_s = now_s
        elif wait.lookups != self._lookups:
            self._lookups, self._moved_s = wait.lookups, now_s

    @property
    def trouble(self) -> str | None:
        """Why nothing can be served; None while all is well."""
        if self._signs.dead:
            return "engine_dead"
        still_s = self._clock() - self._moved_s
        if still_s < self._stall_s or self.waiting_for_table:
            return None
        return f"engine_stalled: {self._signs.unfinished} requests and no step for {still_s:.0f} s"

    @property
    def waiting_for_table(self) -> bool:
        wait = self._file()
        return wait is not None and wait.waiting_since_s is not None

    def close(self) -> None:
        if self._wait is not None:
            self._wait.close()
            self._wait = None
            self._wait_file = None

    def _file(self) -> TableWait | None:
        """The worker makes it once the model is loaded, which is before vLLM serves HTTP."""
        if self._wait is None and self._wait_file is not None:
            try:
                self._wait = TableWait(self._wait_file)
            except (OSError, ValueError):
                return None
        return self._wait
