"""What the table daemon says of itself, where the gateway may ask it (`daemon_url`)."""

import time
from collections.abc import Callable

import msgspec

from ple_gateway.engine_metrics import read_samples
from ple_gateway.upstream import AnswerTimeoutError, Upstream, UpstreamError

_COLD = "ple_daemon_major_faults_total"  # page reads that a lookup waited for
_TIMEOUT_S = 3.0
_SILENT_LOOKS = 3  # a daemon whose drive is busy may miss one
_IDLE_S = 4.0
_FIGURES_EVERY_S = 2.0
_MAX_PAGE_BYTES = 2**20
# It answers no lookups, and says so, or says nothing.
AWAY = frozenset({"down", "starting", "stopping"})


class DaemonWatch:
    """The daemon's state and figures; without a URL both stay unknown."""

    def __init__(self, url: str | None, changed: Callable[[], None]) -> None:
        self._upstream = Upstream(url, {}, connect_timeout_s=_TIMEOUT_S, idle_s=_IDLE_S) if url else None
        self._changed = changed
        self._sampled_s = 0.0
        self._silent_looks = 0
        self.state = "unknown"
        self.reasons: list[str] = []
        self.figures: dict[str, float] = {}
        self.cold_reads_per_s: float | None = None

    @property
    def is_asked(self) -> bool:
        """Whether there is a URL to ask."""
        return self._upstream is not None

    async def aclose(self) -> None:
        """Close the connection."""
        if self._upstream:
            await self._upstream.aclose()

    async def look(self) -> None:
        """Ask once; whatever it does is a state, never an error."""
        if self._upstream is None:
            return
        try:
            ready = await self._upstream.get("/readyz", _TIMEOUT_S, _MAX_PAGE_BYTES)
            body = msgspec.json.decode(ready.body)
            reported = (str(body["state"])[:20], [str(reason)[:200] for reason in body["reasons"][:10]])
        except UpstreamError as exc:
            self._note_silence(exc)
            return
        except (msgspec.DecodeError, RecursionError, LookupError, TypeError):
            self._set("down", ["its /readyz is not a daemon's"])
            return
        self._silent_looks = 0
        if ready.status == 200:
            self._set(*reported)
        else:
            said, reasons = reported
            self._set(said if said in AWAY else "down", [said, *reasons])
        await self._read_figures(self._upstream)

    def _note_silence(self, exc: UpstreamError) -> None:
        self._silent_looks += 1
        well = self.state not in {"unknown", *AWAY}
        if not well or self._silent_looks >= _SILENT_LOOKS or not isinstance(exc, AnswerTimeoutError):
            self._set("down", [f"cannot be reached ({exc})"])

    def _set(self, state: str, reasons: list[str]) -> None:
        self.state, self.reasons = state, reasons
        self._changed()

    async def _read_figures(self, daemon: Upstream) -> None:
        if time.monotonic() - self._sampled_s < _FIGURES_EVERY_S:
            return
        began_s, self._sampled_s = self._sampled_s, time.monotonic()
        try:
            page = await daemon.get("/metrics", _TIMEOUT_S, _MAX_PAGE_BYTES)
        except UpstreamError:
            return
        if page.status == 200:
            before, self.figures = self.figures.get(_COLD), read_samples(page.body)
            cold = self.figures.get(_COLD)
            if before is not None and cold is not None:
                # A restarted daemon counts from 0.
                self.cold_reads_per_s = round(max(0.0, cold - before) / (self._sampled_s - began_s), 1)
