"""Whatever JSON an engine sends, it is relayed or told as the engine's failure, never as the gateway's."""

import asyncio
import json
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ple_gateway.answers import checked_answer
from ple_gateway.anthropic_messages import MessagesDialect
from ple_gateway.choice import Expected
from ple_gateway.chunks import ChunkRelay
from ple_gateway.dialect import CompletionDialect
from ple_gateway.errors import GatewayError
from ple_gateway.openai_responses import ResponsesDialect

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def mostly(usual):
    """What an engine should send, or anything."""
    return st.one_of(usual, usual, usual, JSON)


def record(**fields):
    return mostly(st.fixed_dictionaries({}, optional=fields))


TEXT = mostly(st.sampled_from(["", "a", "<tool_call>", "<function=f>", "</function>", "</think>", "{}", '"']))
FUNCTION = record(name=mostly(st.sampled_from(["f", "g"])), arguments=TEXT)
CALL = record(index=mostly(st.integers(0, 2)), id=mostly(st.sampled_from(["a", "b"])), function=FUNCTION)
DELTA = record(
    role=mostly(st.just("assistant")),
    content=TEXT,
    reasoning=TEXT,
    reasoning_content=TEXT,
    refusal=TEXT,
    tool_calls=mostly(st.lists(CALL, max_size=3)),
)
REASON = mostly(st.sampled_from([None, None, "stop", "length", "tool_calls", "abort"]))
USAGE = record(
    prompt_tokens=mostly(st.integers(0, 9)),
    completion_tokens=mostly(st.integers(0, 9)),
    prompt_tokens_details=record(cached_tokens=mostly(st.integers(0, 9))),
)
HEAD = {"id": mostly(st.just("x")), "created": mostly(st.just(1)), "model": JSON, "usage": USAGE}
CHUNK = record(
    **HEAD,
    choices=mostly(st.lists(record(index=mostly(st.just(0)), delta=DELTA, finish_reason=REASON), max_size=2)),
)
ANSWER = record(
    **HEAD,
    choices=mostly(st.lists(record(message=DELTA, finish_reason=REASON, text=TEXT), max_size=2)),
)
MESSAGES = [{"role": "user", "content": "hi"}]
DIALECTS = {
    "chat": lambda: CompletionDialect("/v1/chat/completions", {}),
    "messages": lambda: MessagesDialect("", {"messages": MESSAGES, "thinking": {"type": "adaptive"}}),
    "responses": lambda: ResponsesDialect("", {"input": "hi"}),
}
EXPECTED = Expected(schema=None, may_be_empty=True, tools={"f": {}}, repair_markup=True)


async def relay(dialect, chunks):
    relay = ChunkRelay(EXPECTED, expected_choices=1, include_usage=True, model="m", note=lambda _: None)
    events = dialect.events()
    frames = b""
    try:
        for chunk in chunks:
            rewritten = await relay.rewrite(json.dumps(chunk).encode())
            frames += events.chunk(rewritten) if rewritten else b""
        relay.check_complete()
        return frames + events.end()
    except GatewayError as error:
        return frames + events.failure(error)


@pytest.mark.parametrize("name", DIALECTS)
@settings(max_examples=80)
@given(chunks=st.lists(CHUNK, max_size=5))
def test_any_stream_is_told_in_whole_events(name, chunks):
    frames = asyncio.run(relay(DIALECTS[name](), chunks))
    assert frames.endswith(b"\n\n")
    for block in frames.decode().removesuffix("\n\n").split("\n\n"):
        data = block.split("data: ", 1)[1]
        assert data == "[DONE]" or isinstance(json.loads(data), dict)


@pytest.mark.parametrize("name", DIALECTS)
@settings(max_examples=80)
@given(answer=ANSWER)
def test_any_answer_is_told_or_refused(name, answer):
    with suppress(GatewayError):
        checked = asyncio.run(checked_answer(json.dumps(answer).encode(), EXPECTED, "m", lambda _: None))
        json.dumps(DIALECTS[name]().answer(checked))
