"""Requests that nobody should send: each is answered in time, in OpenAI's shape, and never with a 5xx."""

import base64
import json
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import hypothesis
from gateway_process import GatewayProcess
from hypothesis import strategies as st
from picture_files import damaged_pictures
from schema_cases import SCHEMAS

SLOWEST_S = 15.0

_TEXT = st.text(max_size=6) | st.sampled_from(
    ["\ud800", "\0", "\u2028", "<|im_start|>", "</think>", "x" * 3000]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | _TEXT | st.just(10**400),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_TEXT, inner, max_size=4),
    max_leaves=10,
)
_ROLES = st.sampled_from(["system", "developer", "user", "assistant", "tool", "function"])
_PART_KINDS = [
    "text",
    "image_url",
    "input_image",
    "image",
    "file",
    "refusal",
    "thinking",
    "tool_result",
    "tool_use",
]
_PART_NAMES = [
    "text",
    "image_url",
    "url",
    "source",
    "data",
    "image",
    "file",
    "mimeType",
    "refusal",
    "thinking",
]
_PARTS = st.builds(
    lambda fields, kind: {**fields, "type": kind},
    st.dictionaries(st.sampled_from(_PART_NAMES), JSON, max_size=3),
    st.sampled_from(_PART_KINDS) | JSON,
)
_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
_MESSAGES = st.fixed_dictionaries(
    {"role": _ROLES},
    optional={
        "content": _TEXT | st.lists(_PARTS | JSON, max_size=3) | JSON,
        "tool_calls": st.just([_CALL]) | JSON,
        "tool_call_id": st.just("c1") | JSON,
        "reasoning_content": JSON,
        "name": JSON,
    },
)
_FIELDS = [
    "model", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "n", "seed",
    "stop", "stream", "stream_options", "logprobs", "top_logprobs", "logit_bias", "tools", "tool_choice",
    "response_format", "presence_penalty", "user", "metadata", "parallel_tool_calls", "reasoning_effort",
    "chat_template_kwargs", "functions", "prompt", "echo", "suffix", "system", "input", "max_output_tokens",
    "guided_json", "min_tokens",
]  # fmt: skip
_FORMATS = st.builds(
    lambda schema, strict, extra: {
        "type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": strict, **extra}
    },
    SCHEMAS, st.booleans(), st.dictionaries(st.sampled_from(["name", "strict", "schema"]), JSON, max_size=1),
)  # fmt: skip
_PATHS = st.sampled_from(["/v1/chat/completions", "/v1/completions", "/tokenize"])


def _chat(**fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "hi"}], **fields}).encode()


def _with_picture(data: bytes, dressed: str) -> bytes:
    url = dressed.replace("DATA", base64.b64encode(data).decode())
    return _chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}])


def _with_damage(body: bytes, changes: list[tuple[float, bytes]]) -> bytes:
    for where, piece in changes:
        at = int(where * len(body))
        body = body[:at] + piece + body[at + len(piece) // 2 :]
    return body


_PIECES = st.sampled_from(
    [b"", b"{", b"[", b'"', b"\\", b"\xff", b"\0", b"NaN", b"1e999", b"null", b",", b"\\ud800"]
)
_CHANGES = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), _PIECES | st.binary(max_size=4)), max_size=4)
_DRESSES = st.sampled_from(
    ["data:image/png;base64,DATA"] * 6 + ["DATA", "data:;base64,DATA=", "data:,DATA", "DATA%"]
)

# What is sent, by name: a strategy of (path, body).
CASES: dict[str, st.SearchStrategy[tuple[str, bytes]]] = {
    "messages": st.builds(
        lambda path, messages: (path, _chat(messages=messages)),
        st.sampled_from(["/v1/chat/completions", "/tokenize"]),
        st.lists(_MESSAGES | JSON, max_size=4) | JSON,
    ),
    "fields": st.builds(
        lambda path, fields: (path, _chat(**fields)),
        _PATHS,
        st.dictionaries(st.sampled_from(_FIELDS), JSON | st.integers(-2, 3) | st.booleans(), max_size=4),
    ),
    "schemas": st.builds(
        lambda shape, stream: ("/v1/chat/completions", _chat(response_format=shape, stream=stream)),
        _FORMATS,
        st.booleans(),
    ),
    "images": st.builds(
        lambda data, dressed: ("/v1/chat/completions", _with_picture(data, dressed)),
        damaged_pictures(),
        _DRESSES,
    ),
    "bodies": st.builds(
        lambda path, fields, changes: (path, _with_damage(_chat(**fields), changes)),
        _PATHS,
        st.dictionaries(st.sampled_from(_FIELDS), JSON, max_size=2),
        _CHANGES,
    ),
}


class Fuzzer:
    """Sends cases to one gateway; `seen` counts (case, status)."""

    def __init__(self, gateway: GatewayProcess) -> None:
        self._gateway = gateway
        self.seen: Counter[tuple[str, int]] = Counter()
        self.slowest_s = 0.0

    def run(self, name: str, examples: int, seed: int) -> None:
        """Raises AssertionError with the smallest request that is answered wrongly."""

        def send(case: tuple[str, bytes]) -> None:
            self.send(name, *case)

        settings = hypothesis.settings(
            max_examples=examples, database=None, deadline=None, print_blob=False,
            suppress_health_check=list(hypothesis.HealthCheck),
        )  # fmt: skip
        test: Callable[[], None] = settings(hypothesis.seed(seed)(hypothesis.given(CASES[name])(send)))
        test()

    def send(self, name: str, path: str, body: bytes) -> None:
        """Send one request and check its answer."""
        began_s = time.monotonic()
        status, answer = self._gateway.send("POST", path, body)
        took_s = time.monotonic() - began_s
        self.slowest_s = max(self.slowest_s, took_s)
        self.seen[name, status] += 1
        assert status < 500, (status, answer[:500])
        assert took_s < SLOWEST_S, took_s
        if status >= 400:
            error = json.loads(answer)["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["message"]
            assert len(error["message"]) <= 4000
        elif answer.startswith(b"data: "):
            events = [json.loads(e[6:]) for e in answer.split(b"\n\n") if e[6:] not in (b"", b"[DONE]")]
            assert not [event for event in events if event.get("error")], answer[-500:]
