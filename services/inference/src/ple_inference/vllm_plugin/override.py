"""What one change to vLLM is: the record from which proof, switch, docs and contract test are derived."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

Place = Literal["front_end", "engine_core", "worker"]
EVERYWHERE: tuple[Place, ...] = ("front_end", "engine_core", "worker")
WORKER: tuple[Place, ...] = ("worker",)

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class OverrideError(RuntimeError):
    """The plugin cannot run as configured. Its text is one line: what, where, what to do."""


@dataclass(frozen=True)
class Upstream:
    """One symbol of vLLM, `module:qualified.name`, and the SHA-256 of its source text when last read."""

    symbol: str
    sha256: str
    role: Literal["replaces", "relies_on"] = "relies_on"

    def __post_init__(self) -> None:
        if not _TARGET.fullmatch(self.symbol):
            raise ValueError(f"{self.symbol!r} is not module:name")
        if not _SHA256.fullmatch(self.sha256):
            raise ValueError(f"{self.symbol}: {self.sha256!r} is no SHA-256")


@dataclass(frozen=True)
class Override:
    """One change to vLLM. `install` and `is_live` are `module:function`, imported only when called.

    `install() -> None` may be called more than once in a process. `is_live() -> bool` looks at what vLLM will
    call, not at what `install` remembers. `requires` names overrides without which this one makes no sense.
    """

    name: str
    summary: str
    upstream: tuple[Upstream, ...]
    why: str
    without_it: str
    remove_when: str
    install: str
    is_live: str
    places: tuple[Place, ...]
    requires: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"{self.name!r} is no override name")
        if not self.upstream or not self.places:
            raise ValueError(f"{self.name}: upstream and places must not be empty")
        for text in (self.summary, self.why, self.without_it, self.remove_when):
            if not text.strip() or "\n" in text:
                raise ValueError(f"{self.name}: each text is one line and not empty")
        for target in (self.install, self.is_live):
            if not _TARGET.fullmatch(target):
                raise ValueError(f"{self.name}: {target!r} is not module:function")

    def install_now(self) -> None:
        _load(self.install)()

    def live_now(self) -> bool:
        return bool(_load(self.is_live)())


def _load(target: str) -> Callable[[], Any]:
    module, _, name = target.partition(":")
    function: Callable[[], Any] = getattr(import_module(module), name)
    return function
