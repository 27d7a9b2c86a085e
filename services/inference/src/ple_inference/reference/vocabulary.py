"""Tokens as bytes, and bytes as text that never shows half a character."""

from __future__ import annotations

import codecs
from pathlib import Path

from tokenizers import Tokenizer

from ple_inference.byte_level import BYTE_OF_CHARACTER


class Vocabulary:
    """The checkpoint's byte-level tokenizer. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.no_truncation()
        self.size = self.tokenizer.get_vocab_size(with_added_tokens=True)
        """Ids from here on have no text."""
        self._added = {
            token_id: (b"" if token.special else token.content.encode())
            for token_id, token in self.tokenizer.get_added_tokens_decoder().items()
        }

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; markers such as <|im_end|> in it become their own ids."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def id_of(self, token: str) -> int | None:
        token_id: int | None = self.tokenizer.token_to_id(token)
        return token_id

    def bytes_of(self, token_id: int) -> bytes:
        """Visible bytes of a token: none for special ones."""
        added = self._added.get(token_id)
        if added is not None:
            return added
        return self._ordinary_bytes(token_id)

    def literal_bytes_of(self, token_id: int) -> bytes:
        """Bytes of a token, special ones written out: what logprobs show."""
        if token_id in self._added:
            return str(self.tokenizer.id_to_token(token_id)).encode()
        return self._ordinary_bytes(token_id)

    def _ordinary_bytes(self, token_id: int) -> bytes:
        text = self.tokenizer.id_to_token(token_id) or ""
        return bytes(BYTE_OF_CHARACTER[character] for character in text)


class TextStream:
    """Bytes of tokens in, text out. A character comes out once its last byte is there."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        # Bytes that no continuation could make valid become U+FFFD; an unfinished character waits.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._vocabulary.bytes_of(token_id))
