"""Structured output: a schema or a tool choice becomes a mask over tokens, by xgrammar."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import xgrammar
from torch import Tensor

from ple_inference.byte_level import CHARACTER_OF_BYTE
from ple_inference.reference.vocabulary import Vocabulary

_CACHE_BYTES = 64 * 2**20
_WORKERS = 2
_MAX_COMPILING = 8
_CONTROL = re.compile(f"[{CHARACTER_OF_BYTE[0]}-{CHARACTER_OF_BYTE[0x1F]}]")
# xgrammar's messages begin with a time and a line of its source.
_SOURCE_PLACE = re.compile(r"^\[[\d:]+\] \S+:\d+: ")


class GrammarError(Exception):
    """A grammar that cannot be compiled; the compiler's message."""


class GrammarBusyError(Exception):
    """Too many grammars are being compiled."""


class GrammarState:
    """Where one sequence stands in its grammar."""

    def __init__(self, compiled: xgrammar.CompiledGrammar, vocab_size: int, legal: Tensor | None) -> None:
        self._legal = legal
        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._bits = xgrammar.allocate_token_bitmask(1, vocab_size)
        self._vocab_size = vocab_size
        self._stop_ids = list(self._matcher.stop_token_ids)

    def allowed(self) -> Tensor:
        """[vocab] bool: tokens that may come next, stop tokens among them once the grammar may end."""
        self._matcher.fill_next_token_bitmask(self._bits)
        places = torch.arange(32, dtype=torch.int32)
        mask = (self._bits.view(-1, 1) >> places) & 1
        allowed = mask.view(-1)[: self._vocab_size].bool()
        return allowed if self._legal is None else allowed & self._legal

    def accept(self, token: int) -> None:
        if not self._matcher.accept_token(token):
            raise RuntimeError(f"the grammar refused token {token}, which it had allowed")

    def complete(self) -> bool:
        """Whether nothing but a stop token may follow."""
        if self._matcher.is_terminated():
            return True
        if not self._matcher.is_completed():
            return False
        allowed = self.allowed()
        allowed[self._stop_ids] = False
        return not bool(allowed.any())


class GrammarCompiler:
    """Compiles off the event loop and off the engine's thread, with a deadline and a cache."""

    def __init__(
        self, vocabulary: Vocabulary, vocab_size: int, stop_ids: frozenset[int], deadline_s: float
    ) -> None:
        tokens = [vocabulary.tokenizer.id_to_token(i) or "" for i in range(vocabulary.size)]
        # xgrammar lets control characters into strings of bounded length, where JSON forbids them raw.
        self._json_tokens = torch.zeros(vocab_size, dtype=torch.bool)
        self._json_tokens[: len(tokens)] = torch.tensor([not _CONTROL.search(token) for token in tokens])
        info = xgrammar.TokenizerInfo(
            tokens,
            vocab_type=xgrammar.VocabType.BYTE_LEVEL,
            vocab_size=vocab_size,
            stop_token_ids=sorted(stop_ids),
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=_CACHE_BYTES)
        self._vocab_size, self._deadline_s = vocab_size, deadline_s
        self._workers = ThreadPoolExecutor(_WORKERS, thread_name_prefix="grammar")
        self._compiling = 0

    async def any_object(self) -> Callable[[], GrammarState]:
        """Any JSON object."""
        return await self.schema({"type": "object"})

    async def schema(self, schema: Any) -> Callable[[], GrammarState]:
        """JSON that meets `schema`, without members that an object's `properties` do not name.

        Each call of the result starts at the grammar's beginning. Raises GrammarError, GrammarBusyError.
        """
        text = json.dumps(schema)
        # Free whitespace would let a wandering model write spaces for ever.
        return await self._compile(
            lambda: self._compiler.compile_json_schema(text, any_whitespace=False), self._json_tokens
        )

    async def tool_calls(self, tools: list[dict[str, Any]], *, parallel: bool) -> Callable[[], GrammarState]:
        """At least one call of one of `tools` in Qwen's XML form. Raises as `schema`."""
        calls = [
            {
                "type": "tag",
                "begin": f"<tool_call>\n<function={tool['function']['name']}>\n",
                "content": {
                    "type": "json_schema",
                    "json_schema": tool["function"].get("parameters") or {"type": "object"},
                    "style": "qwen_xml",
                    "max_whitespace_cnt": 1,
                },
                "end": "\n</function>\n</tool_call>",
            }
            for tool in tools
        ]
        content = {
            "type": "tags_with_separator",
            "tags": calls,
            "separator": "\n",
            "at_least_one": True,
            "stop_after_first": not parallel,
        }
        tag = json.dumps({"type": "structural_tag", "format": content})
        return await self._compile(lambda: self._compiler.compile_structural_tag(tag), None)

    async def _compile(
        self, compile_it: Callable[[], xgrammar.CompiledGrammar], legal: Tensor | None
    ) -> Callable[[], GrammarState]:
        if self._compiling >= _MAX_COMPILING:
            raise GrammarBusyError("too many grammars are being compiled; try again")
        self._compiling += 1
        began = threading.Event()

        def work() -> xgrammar.CompiledGrammar:
            began.set()
            return compile_it()

        future = asyncio.get_running_loop().run_in_executor(self._workers, work)
        # Counts till the work ends, even if its request does not wait that long.
        future.add_done_callback(self._done)
        try:
            compiled = await asyncio.wait_for(asyncio.shield(future), self._deadline_s)
        except TimeoutError as error:
            if not began.is_set():
                future.cancel()
                raise GrammarBusyError("other grammars are being compiled; try again") from error
            raise GrammarError(f"compiling took longer than {self._deadline_s:g} s") from error
        except (ValueError, RuntimeError) as error:
            raise GrammarError(_SOURCE_PLACE.sub("", str(error).strip().splitlines()[-1])) from error
        return lambda: GrammarState(compiled, self._vocab_size, legal)

    def _done(self, future: asyncio.Future[xgrammar.CompiledGrammar]) -> None:
        self._compiling -= 1
        if not future.cancelled():
            future.exception()  # seen: a request that no longer waits must not leave a warning

    def close(self) -> None:
        self._workers.shutdown(wait=False, cancel_futures=True)
