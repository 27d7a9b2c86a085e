"""Logprobs as chat and text completions write them."""

from __future__ import annotations

from typing import Any

from ple_inference.reference.sampling import TokenLogprobs
from ple_inference.reference.vocabulary import Vocabulary


def chat_logprobs(entry: TokenLogprobs, vocabulary: Vocabulary) -> dict[str, Any]:
    """One element of choices[].logprobs.content."""

    def describe(token: int, logprob: float) -> dict[str, Any]:
        data = vocabulary.literal_bytes_of(token)
        return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}

    top = [describe(token, logprob) for token, logprob in entry.top]
    return {**describe(entry.token, entry.logprob), "top_logprobs": top}


def completion_logprobs(entries: list[TokenLogprobs], vocabulary: Vocabulary, offset: int) -> dict[str, Any]:
    """choices[].logprobs of a text completion; `offset` is where its text begins."""

    def text(token: int) -> str:
        return vocabulary.literal_bytes_of(token).decode(errors="replace")

    offsets = []
    for entry in entries:
        offsets.append(offset)
        offset += len(text(entry.token))
    return {
        "tokens": [text(entry.token) for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [{text(t): logprob for t, logprob in entry.top} for entry in entries],
        "text_offset": offsets,
    }
