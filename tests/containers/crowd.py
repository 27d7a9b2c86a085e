"""Two long streams and a queue behind them, which tests of restarts disturb; what their clients saw."""

import re
from collections import Counter

import openai
from deployment import Deployment
from long_stream import LongStream
from waiting import wait_for

LONG_TOKENS, SHORT_TOKENS = 64, 12
LONG = ("Tell me a long story.", "Count the stars.")
# One key may have four requests in flight: two of these run, and for two turns of theirs some of the others
# wait in the gateway, which is long enough to be seen.
SHORT = ("Name a river.", "Name a colour.", "Name a bird.", "Name a tree.", "Name a fish.", "Name a stone.")
STARTED = 2
_DEADLINE_S = 240
Tokens = list[tuple[str, float]]


class Crowd:
    """Eight streams at once, started so that both long ones are decoding and others wait."""

    def __init__(self, deployment: Deployment, client: openai.OpenAI) -> None:
        self.long = [LongStream(client, prompt, LONG_TOKENS) for prompt in LONG]
        wait_for(lambda: all(stream.tokens or stream.error for stream in self.long), "first tokens")
        self.short = [LongStream(client, prompt, SHORT_TOKENS) for prompt in SHORT]
        wait_for(lambda: self._is_under_way(deployment), "two decoding requests and a queue", poll_s=0.1)

    def _is_under_way(self, deployment: Deployment) -> bool:
        assert [stream.error for stream in self.streams] == [None] * len(self.streams)
        decoding = all(STARTED <= len(stream.tokens) < LONG_TOKENS // 2 for stream in self.long)
        waiting = re.findall(
            r"^ple_gateway_requests_queued\S* (\S+)$", deployment.get("/metrics")[1], re.MULTILINE
        )
        return decoding and sum(map(float, waiting)) >= 1

    @property
    def streams(self) -> list[LongStream]:
        return [*self.long, *self.short]

    def ended(self) -> list[Tokens]:
        """The tokens of each stream, once all have ended in whatever way."""
        for stream in self.streams:
            stream.join(_DEADLINE_S)
            assert not stream.is_alive(), f"a stream hangs after {len(stream.tokens)} tokens"
        return [stream.tokens for stream in self.streams]

    def seen(self) -> str:
        """What the clients saw, in words."""
        count = Counter(_outcome(stream) for stream in self.streams)
        return "; ".join(f"{number} {outcome}" for outcome, number in sorted(count.items()))

    def lost_tokens(self, undisturbed: list[Tokens]) -> int:
        """How many tokens did not come."""
        came = (len(stream.tokens) for stream in self.streams)
        return sum(len(whole) for whole in undisturbed) - sum(came)

    def longest_pause_s(self) -> float:
        return max(stream.longest_pause_s for stream in self.long)

    def errors(self) -> list[Exception]:
        return [stream.error for stream in self.streams if stream.error]


def is_prefix(part: Tokens, whole: Tokens) -> bool:
    return part == whole[: len(part)]


def _outcome(stream: LongStream) -> str:
    error = stream.error
    if error is None:
        return "whole" if stream.finish_reason == "length" else "ended without a word"
    if isinstance(error, openai.APIStatusError):
        return f"refused with {error.status_code} `{error.code}`"
    if isinstance(error, openai.APIConnectionError):
        return "cut off" if stream.tokens else "cut off before the first token"
    if isinstance(error, openai.APIError):
        return f"ended by an error event `{error.code}`"
    return f"cut off ({type(error).__name__})"
