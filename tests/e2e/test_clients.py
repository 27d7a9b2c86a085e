"""Clients that users have send and stream a request to the tiny model, through all three services."""

import anthropic
import pytest

pytestmark = pytest.mark.e2e

KEY = "sk-end-to-end"
MODEL = "triplex-tiny"
HELLO = [{"role": "user", "content": "Hello! Tell me about n-grams."}]


@pytest.fixture
def claude(stack):
    with anthropic.Anthropic(base_url=stack.gateway, api_key=KEY, max_retries=0, timeout=120) as client:
        yield client


def test_anthropic_messages(claude):
    options = {"model": MODEL, "messages": HELLO, "max_tokens": 12, "extra_body": {"temperature": 0}}
    whole = claude.messages.create(**options, system="You are brief.")
    assert whole.stop_reason == "max_tokens"
    assert whole.content[0].text
    assert whole.usage.output_tokens == 12
    with claude.messages.stream(**options, system="You are brief.") as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text
    assert final.usage == whole.usage
    counted = claude.messages.count_tokens(model=MODEL, messages=HELLO, system="You are brief.")
    assert counted.input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens


def test_anthropic_thinking_and_keys(claude, stack):
    thought = claude.messages.create(
        model=MODEL,
        messages=HELLO,
        max_tokens=8,
        thinking={"type": "enabled", "budget_tokens": 1024},
    )
    assert [block.type for block in thought.content] == ["thinking"]
    with (
        anthropic.Anthropic(base_url=stack.gateway, api_key="sk-wrong", max_retries=0) as stranger,
        pytest.raises(anthropic.AuthenticationError),
    ):
        stranger.messages.create(model=MODEL, messages=HELLO, max_tokens=3)


def test_openai_responses(client):
    options = {"model": MODEL, "input": HELLO, "max_output_tokens": 12, "temperature": 0}
    whole = client.responses.create(**options)
    assert whole.status == "incomplete"
    assert whole.output_text
    assert whole.usage.output_tokens == 12
    events = list(client.responses.create(**options, stream=True))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text
    assert events[-1].type == "response.incomplete"
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_node_sdk(stack, node_openai):
    got = node_openai(stack.gateway, KEY, max_tokens=6)
    assert got["whole"]["text"]
    assert got["whole"]["usage"]["completion_tokens"] == 6
    assert got["streamed"]["text"]
    assert got["streamed"]["usage"]["completion_tokens"] == 6
    assert got["streamed"]["finish"] == "length"
    assert got["events"][-1] == "response.incomplete"


def test_qwen_code(stack, metric, qwen_code, tmp_path):
    """The model is random: that an answer of so many tokens arrives is all that can be said."""
    folder = tmp_path / "work"
    folder.mkdir()
    before = metric(stack.inference, "ple_inference_generation_tokens_total")
    # Its own prompt with its tools takes a CPU more than a minute.
    short = (
        "--auth-type",
        "openai",
        "--bare",
        "--system-prompt",
        "You are brief.",
        "--core-tools",
        "read_file",
    )
    ran = qwen_code(stack.gateway, "Say hello", folder, *short, key=KEY, max_tokens=16)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip()
    assert metric(stack.inference, "ple_inference_generation_tokens_total") - before >= 16
