"""Token traces: what an engine was asked, to be replayed against models of caches.

Formats: a text file of ids, a .npy array of ids (both one sequence, every token a step), and .jsonl with a
request {"prompt": [ids], "output": [ids]} on each line (prompts are prefill, every output token a step).
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ple_daemon.errors import DaemonError

Tokens = npt.NDArray[np.int64]

# Ids are 32-bit on the wire.
_MIN_ID, _MAX_ID = -(2**31), 2**31 - 1
_ZIPF_EXPONENT = 1.3


class TraceError(DaemonError):
    """A trace that cannot be read."""


@dataclass(frozen=True, slots=True)
class Sequence:
    """One request: its tokens, and how many of them are the prompt."""

    tokens: Tokens
    prompt_tokens: int


def read_trace(path: Path) -> list[Sequence]:
    """The requests of a trace in order. Raises TraceError, which names file and line."""
    try:
        if path.suffix == ".npy":
            sequences = [Sequence(_ids(np.load(path, allow_pickle=False)), 0)]
        elif path.suffix == ".jsonl":
            sequences = list(_requests(path))
        else:
            sequences = [_text(path)]
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, EOFError) as error:  # EOFError: an empty .npy
        raise TraceError(f"{path}: {error}") from error
    if not sum(len(sequence.tokens) for sequence in sequences):
        raise TraceError(f"{path}: holds no token")
    return sequences


def zipf_trace(tokens: int, vocab_size: int, seed: int = 0) -> list[Sequence]:
    """One sequence of independent tokens whose frequencies follow Zipf's law, so that n-grams repeat."""
    rng = np.random.default_rng(seed)
    ranks = rng.zipf(_ZIPF_EXPONENT, tokens) % vocab_size
    return [Sequence(rng.permutation(vocab_size)[ranks], 0)]


def _text(path: Path) -> Sequence:
    try:
        ids = np.array(path.read_text().replace(",", " ").split(), np.int64)
    except (UnicodeDecodeError, OverflowError, ValueError) as error:
        raise ValueError("not a text file of token ids (use .npy or .jsonl for the other formats)") from error
    return Sequence(_ids(ids), 0)


def _requests(path: Path) -> Iterator[Sequence]:
    with path.open() as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}: line {number}"
            try:
                request = json.loads(line)
                prompt, output = _ids(request["prompt"]), _ids(request.get("output", []))
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                raise TraceError(f'{where} is no request {{"prompt": [ids], "output": [ids]}}') from error
            yield Sequence(np.concatenate([prompt, output]), len(prompt))


def _ids(values: npt.ArrayLike) -> Tokens:
    ids = np.asarray(values)
    if ids.size == 0:
        return np.zeros(0, np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(f"token ids must be a flat list of integers, not {ids.dtype} of shape {ids.shape}")
    if ids.min() < _MIN_ID or ids.max() > _MAX_ID:
        raise ValueError("a token id does not fit in 32 bits")
    return ids.astype(np.int64)
