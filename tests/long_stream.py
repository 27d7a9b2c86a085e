"""A long greedy stream that tests disturb, read in a thread of its own."""

import threading
import time
from itertools import pairwise

import openai


class LongStream(threading.Thread):
    """Chat tokens with their log-probabilities, as they come."""

    def __init__(self, client: openai.OpenAI, prompt: str, max_tokens: int) -> None:
        super().__init__(daemon=True)
        self._client, self._prompt, self._max_tokens = client, prompt, max_tokens
        self.tokens: list[tuple[str, float]] = []
        self._came_s = [time.monotonic()]
        self.finish_reason: str | None = None
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            stream = self._client.chat.completions.create(
                model="triplex-tiny",
                messages=[{"role": "user", "content": self._prompt}],
                max_tokens=self._max_tokens,
                temperature=0,
                logprobs=True,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            for chunk in stream:
                for choice in chunk.choices:
                    if choice.logprobs and choice.logprobs.content:
                        self._came_s.append(time.monotonic())
                        self.tokens += [(t.token, t.logprob) for t in choice.logprobs.content]
                    self.finish_reason = choice.finish_reason or self.finish_reason
        except Exception as error:
            self.error = error

    @property
    def longest_pause_s(self) -> float:
        """The longest time without a token, the first token's included."""
        return max((after - before for before, after in pairwise(self._came_s)), default=0.0)

    def finished(self, deadline_s: float) -> list[tuple[str, float]]:
        """All tokens; fails unless the stream ended at its limit."""
        self.join(deadline_s)
        assert not self.is_alive(), f"the stream hangs after {len(self.tokens)} tokens"
        assert self.error is None, f"the client saw {self.error!r}"
        assert self.finish_reason == "length"
        return self.tokens
