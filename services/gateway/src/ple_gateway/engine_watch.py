"""What state the engine is in: asked every two seconds, and proven by a first token before it is used."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from enum import StrEnum

import msgspec

from ple_gateway.capacity import parse_capacity
from ple_gateway.engine import Engine, EngineCall
from ple_gateway.engine_metrics import EngineSample, StallDetector, engine_sample
from ple_gateway.errors import GatewayError
from ple_gateway.gate import Gate
from ple_gateway.models import ModelCatalogue
from ple_gateway.settings import Settings
from ple_gateway.upstream import ConnectError, Reply, UpstreamError

_LOG = logging.getLogger(__name__)
WAITING_FOR_TABLE = "waiting_for_table"
_STALLED = "engine_stalled"  # our inference's own verdict, from the steps that its worker counts
_DEAD = "engine_dead"
_SILENT_LOOKS = 3  # an engine that renders a large prompt may miss one
_LOOKS_A_STALL = 9  # how often its work is looked at within the time after which it counts as stalled


class EngineState(StrEnum):
    """From nothing to serving."""

    UNKNOWN = "unknown"
    DOWN = "down"
    LOADING = "loading"
    WARMING = "warming"
    READY = "ready"
    DEGRADED = "degraded"
    STALLED = "stalled"
    STOPPING = "stopping"

    @property
    def serves(self) -> bool:
        """Whether requests may be sent to it."""
        return self in {EngineState.READY, EngineState.DEGRADED}


class EngineWatch:
    """Knows the engine's state, its reasons and its work; `changed` is called after every look."""

    def __init__(
        self,
        settings: Settings,
        engine: Engine,
        models: ModelCatalogue,
        gate: Gate,
        changed: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._models = models
        self._gate = gate
        self._changed = changed
        self._stall = StallDetector(settings.stall_timeout_s)
        self._wake = asyncio.Event()
        self._stalled = False
        self._silent_looks = 0
        self._sampled_s = 0.0
        self.state = EngineState.UNKNOWN
        self.reasons: list[str] = []
        self.sample: EngineSample | None = None
        self.tokens_per_s = 0.0

    @property
    def waiting_for_table(self) -> bool:
        """Whether a lookup of the engine waits for the daemon."""
        return any(WAITING_FOR_TABLE in reason for reason in self.reasons)

    def note_unreachable(self) -> None:
        """A request found nobody at the engine's address: believe it, and look again now."""
        self._set(EngineState.DOWN, ["refuses connections"])
        self._wake.set()

    async def woken(self, timeout_s: float) -> None:
        """Wait for the next look."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._wake.wait()
        except TimeoutError:
            pass
        self._wake.clear()

    async def look(self) -> None:
        """Ask the engine once; whatever it does is a state, never an error."""
        try:
            health = await self._engine.get("/health")
        except ConnectError as exc:
            self._set(EngineState.DOWN, [f"cannot be reached ({exc})"])
            return
        except UpstreamError as exc:
            self._note_silence(exc)
            return
        self._silent_looks = 0
        said, reasons = _report(health)
        if health.status != 200:
            self._set(_unwell(said, reasons), reasons or [f"/health answers {health.status}"])
            return
        await self._read_capacity()
        if await self._is_stalled(reasons):
            self._set(
                EngineState.STALLED,
                [f"has requests and made no token for {self._settings.stall_timeout_s:g} s"],
            )
        elif self.state.serves or await self._is_warm(reasons):
            self._set(EngineState.DEGRADED if reasons else EngineState.READY, reasons)

    def _set(self, state: EngineState, reasons: list[str]) -> None:
        self.state, self.reasons = state, reasons
        self._changed()

    def _note_silence(self, exc: UpstreamError) -> None:
        self._silent_looks += 1
        reason = [f"/health does not answer ({exc})"]
        if not self.state.serves:
            self._set(EngineState.DOWN if self.state is not EngineState.STALLED else self.state, reason)
        elif self._silent_looks >= _SILENT_LOOKS:
            self._set(EngineState.STALLED, reason)

    async def _read_capacity(self) -> None:
        # At every look: an engine that restarted between two looks may have another pool.
        try:
            answer = await self._engine.get("/v1/triplex/capacity")
            body = msgspec.json.decode(answer.body) if answer.status == 200 else None
        except (UpstreamError, msgspec.DecodeError, RecursionError):
            return
        capacity = parse_capacity(body)
        # A look that failed says nothing: without a pool all that waits would be sent at once.
        if capacity or answer.status == 404:
            self._gate.capacity = capacity

    async def _is_stalled(self, reasons: list[str]) -> bool:
        now_s = time.monotonic()
        if now_s - self._sampled_s < self._settings.stall_timeout_s / _LOOKS_A_STALL:
            return self._stalled
        try:
            page = await self._engine.get("/metrics")
        except UpstreamError:
            return self._stalled
        sample = engine_sample(page.body) if page.status == 200 else None
        self._note_work(sample, now_s)
        excused = any(WAITING_FOR_TABLE in reason for reason in reasons)
        self._stalled = self._stall.look(sample, self._gate.events_relayed, now_s, excused=excused)
        return self._stalled

    def _note_work(self, sample: EngineSample | None, now_s: float) -> None:
        passed_s = now_s - self._sampled_s
        if sample and self.sample:
            # A restarted engine counts from 0.
            made = max(0.0, sample.generated_tokens - self.sample.generated_tokens)
            self.tokens_per_s = made / passed_s
        self.sample, self._sampled_s = sample, now_s

    async def _is_warm(self, reasons: list[str]) -> bool:
        """Whether the engine gives a token; while it is asked, and if not, the state says so."""
        if self.state is not EngineState.WARMING:
            self._set(EngineState.WARMING, reasons)
        await self._models.refresh()
        busy = self.sample is not None and self.sample.running > 0
        if not self._settings.warm_probe or busy or any(WAITING_FOR_TABLE in reason for reason in reasons):
            return True
        fault = await self._first_token_fault()
        if fault:
            self._set(EngineState.WARMING, [*reasons, fault])
        return not fault

    async def _first_token_fault(self) -> str | None:
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "temperature": 0}
        if self._models.default is not None:
            body["model"] = self._models.default
        call = EngineCall("/v1/chat/completions", msgspec.json.encode(body))
        try:
            await self._engine.ask(call, self._settings.warm_probe_timeout_s)
        except TimeoutError:
            return f"gave no first token within {self._settings.warm_probe_timeout_s:g} s"
        except GatewayError as error:
            # A refusal of this little request says nothing about others.
            return f"failed a first token with status {error.status}" if error.status >= 500 else None
        return None


async def keep_looking(look: Callable[[], Awaitable[None]], pause: Callable[[], Awaitable[None]]) -> None:
    """Look, pause, look again, until cancelled; one look at a time, and none is the last."""
    while True:
        try:
            await look()
        except Exception:
            _LOG.exception("a look failed by a fault of the gateway")
        await pause()


def _unwell(said: str, reasons: list[str]) -> EngineState:
    if any(reason.startswith(_STALLED) for reason in reasons):
        return EngineState.STALLED
    if said == EngineState.STOPPING:
        return EngineState.STOPPING
    return EngineState.DOWN if _DEAD in reasons else EngineState.LOADING


def _report(health: Reply) -> tuple[str, list[str]]:
    """Read the state and the reasons that our inference gives with its health; other engines have none."""
    try:
        body = msgspec.json.decode(health.body)
    except (msgspec.DecodeError, RecursionError):
        return "", []
    if not isinstance(body, dict):
        return "", []
    reasons = body.get("reasons")
    shown = [str(reason)[:200] for reason in reasons[:10]] if isinstance(reasons, list) else []
    return str(body.get("state", "")), shown
