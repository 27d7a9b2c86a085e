"""The hash against Transformers' golden rows, a scalar oracle, and its own laws."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ple_daemon.hash_constants import HashConstants, derive, padded_rows
from ple_daemon.ngram_hash import NgramHash
from ple_rpc.errors import BadRequest

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "ngram_ids.json").read_text())
EOS = 500
TINY = derive(vocab_size=512, eos_token_id=EOS, ngram_vocab_size_base=2000)


def constants_of(spec: str) -> HashConstants:
    fields = dict(GOLDEN["specs"][spec]["config"])
    fields.pop("make_ngram_vocab_size_divisible_by")
    return derive(**fields)


def lcg(seed: int, count: int, eos_every: int) -> np.ndarray:
    state, tokens = seed, []
    for position in range(count):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        is_eos = eos_every > 0 and position % eos_every == eos_every - 1
        tokens.append(248044 if is_eos else (state >> 33) % 248320)
    return np.array(tokens, np.int64)


def oracle(constants: HashConstants, tokens: list[int], context: list[int]) -> list[list[int]]:
    """Row ids one position at a time, with Python's unbounded integers."""
    before = [constants.eos_token_id] * (constants.context_length - len(context)) + context
    history, rows = before + tokens, []
    for at in range(len(before), len(history)):
        values = [history[at]]
        for step in range(1, constants.ngram_size):
            cut = constants.eos_token_id in history[at - step : at]
            values.append(constants.eos_token_id if cut else history[at - step])
        row = []
        for head, (size, offset) in enumerate(zip(constants.head_sizes, constants.head_offsets, strict=True)):
            mixed = 0
            for value, multiplier in list(zip(values, constants.multipliers, strict=True))[
                : head // constants.heads_per_ngram + 2
            ]:
                mixed ^= (value * multiplier) % 2**64
            row.append((mixed - 2**64 if mixed >= 2**63 else mixed) % size + offset)
        rows.append(row)
    return rows


@pytest.mark.parametrize("spec", GOLDEN["specs"])
def test_constants_equal_transformers(spec: str) -> None:
    expected = GOLDEN["specs"][spec]["constants"]
    constants = constants_of(spec)
    assert list(constants.multipliers) == expected["multipliers"]
    assert list(constants.head_sizes) == expected["primes"]
    assert list(constants.head_offsets) == expected["offsets"]
    assert constants.used_rows == expected["used_rows"]
    assert padded_rows(constants.used_rows, 128) == expected["rows"]


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["name"])
def test_golden_rows(case: dict) -> None:
    rows = NgramHash(constants_of(case["spec"])).row_ids(case["tokens"], case["context"])
    assert rows.tolist() == case["rows"]


@pytest.mark.parametrize("case", GOLDEN["long_cases"], ids=lambda case: case["name"])
def test_golden_streams(case: dict) -> None:
    streams = {
        "lcg_42000": lambda: lcg(20261129, 42_000, 97),
        "lcg_42000_no_eos_with_context": lambda: lcg(7, 42_000, 0),
    }
    tokens = np.array(case["tokens"]) if "tokens" in case else streams[case["name"]]()
    if "tokens_sha256" in case:
        assert hashlib.sha256(tokens.astype("<i8").tobytes()).hexdigest() == case["tokens_sha256"]
    rows = NgramHash(constants_of(case["spec"])).row_ids(tokens, case["context"])
    assert rows.shape == (case["count"], 16)
    assert rows[0].tolist() == case["first_row"]
    assert rows[-1].tolist() == case["last_row"]
    assert hashlib.sha256(rows.astype("<i8").tobytes()).hexdigest() == case["rows_sha256"]


def test_d01_public_vector_with_one_head_per_ngram() -> None:
    vector = GOLDEN["cross_check"]
    constants = HashConstants(
        vector["ngram_size"], vector["heads_per_ngram"], vector["eos"],
        tuple(vector["multipliers"]), tuple(vector["primes"]), tuple(vector["offsets"]),
    )  # fmt: skip
    assert NgramHash(constants).row_ids(vector["tokens"], vector["context"]).tolist() == vector["rows"]


def test_missing_context_is_eos() -> None:
    hash_ = NgramHash(TINY)
    start = hash_.row_ids([5, 7], [EOS, EOS])
    assert np.array_equal(hash_.row_ids([5, 7]), start)
    assert np.array_equal(hash_.row_ids([5, 7], [EOS]), start)
    assert np.array_equal(hash_.row_ids([5, 7], [3]), hash_.row_ids([5, 7], [EOS, 3]))


def test_no_tokens_no_rows() -> None:
    assert NgramHash(TINY).row_ids([]).shape == (0, 16)


def test_long_context_is_refused() -> None:
    with pytest.raises(BadRequest, match="3 ids"):
        NgramHash(TINY).row_ids([1], [1, 2, 3])


# Small ids make EOS and repeats likely; the others wrap in int64 and go negative.
ids = st.one_of(
    st.sampled_from([EOS, EOS - 1, 0, 1, 511]), st.integers(0, 511), st.integers(-(2**31), 2**31 - 1)
)
sequences = st.lists(ids, max_size=40)
contexts = st.lists(ids, max_size=2)


@settings(max_examples=200)
@given(sequences, contexts)
def test_equals_the_scalar_oracle(tokens: list[int], context: list[int]) -> None:
    assert NgramHash(TINY).row_ids(tokens, context).tolist() == oracle(TINY, tokens, context)


@settings(max_examples=100)
@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=20), contexts)
def test_wildest_ids_stay_inside_their_head(tokens: list[int], context: list[int]) -> None:
    rows = NgramHash(TINY).row_ids(tokens, context)
    first = np.array(TINY.head_offsets)
    assert (rows >= first).all()
    assert (rows < first + np.array(TINY.head_sizes)).all()


@settings(max_examples=100)
@given(sequences, contexts)
def test_d03_any_split_gives_the_same_rows(tokens: list[int], context: list[int]) -> None:
    hash_ = NgramHash(TINY)
    whole = hash_.row_ids(tokens, context)
    for at in range(len(tokens) + 1):
        history = (context + tokens[:at])[-2:]
        assert np.array_equal(hash_.row_ids(tokens[at:], history), whole[at:])


def test_d05_ragged_lengths_and_eos_anywhere() -> None:
    """Sequences of one batch, 8,192 tokens beside 255 of one token, are hashed as if each were alone."""
    hash_, rng = NgramHash(TINY), np.random.default_rng(5)
    sequences = [rng.integers(0, 512, 8192).tolist(), *([token] for token in range(EOS - 127, EOS + 128))]
    for places in ([], [0], [4096], [8191], [0, 4096, 8191], range(8192)):
        for place in places:
            sequences[0][place] = EOS
        for tokens in sequences[: None if not places else 1]:
            assert hash_.row_ids(tokens).tolist() == oracle(TINY, tokens, [])


@pytest.mark.parametrize("count", [0, 1, 2047, 2048, 2049, 5000])
@pytest.mark.parametrize("context", [[], [3], [3, EOS]])
def test_pieces_of_a_prompt_are_its_rows(count: int, context: list[int]) -> None:
    hash_ = NgramHash(TINY)
    tokens = np.random.default_rng(count).integers(490, 510, count)
    pieces = [piece.copy() for piece in hash_.pieces(tokens, context)]
    assert np.array_equal(np.concatenate([np.zeros((0, 16)), *pieces]), hash_.row_ids(tokens, context))


@pytest.mark.parametrize(("ngram_size", "heads_per_ngram", "layer"), [(2, 4, 0), (4, 3, 0), (3, 8, 2)])
def test_other_shapes_equal_the_oracle(ngram_size: int, heads_per_ngram: int, layer: int) -> None:
    constants = derive(
        vocab_size=512, eos_token_id=EOS, ngram_size=ngram_size, heads_per_ngram=heads_per_ngram,
        ngram_vocab_size_base=50, ple_layer_index=layer,
    )  # fmt: skip
    tokens = [int(token) for token in np.random.default_rng(1).integers(490, 510, 60)]
    assert NgramHash(constants).row_ids(tokens).tolist() == oracle(constants, tokens, [])
