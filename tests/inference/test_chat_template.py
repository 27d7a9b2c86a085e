"""The tiny model's chat template renders the forms that Qwen3.8's has."""

from __future__ import annotations

from contextlib import suppress
from importlib import resources
from pathlib import Path

import pytest

from ple_inference.reference.chat_prompt import ChatTemplate, MessageError

USER = {"role": "user", "content": "Question"}
OPEN = "<|im_start|>assistant\n<think>\n"


@pytest.fixture
def template(tmp_path: Path) -> ChatTemplate:
    source = resources.files("ple_inference.tiny") / "chat_template.jinja"
    (tmp_path / "chat_template.jinja").write_text(source.read_text())
    return ChatTemplate(tmp_path)


def render(template: ChatTemplate, messages: list[dict], tools: list[dict] = [], **options: object) -> str:  # noqa: B006
    return template.render(messages, tools, options).text


def test_thinking_is_off_unless_asked_for(template: ChatTemplate) -> None:
    assert render(template, [USER]) == f"<|im_start|>user\nQuestion<|im_end|>\n{OPEN}\n</think>\n\n"
    assert not template.render([USER], [], {}).thinking
    assert template.render([USER], [], {"enable_thinking": True}).thinking
    assert render(template, [USER], enable_thinking=True).endswith(OPEN)


def test_effort_is_a_system_sentence(template: ChatTemplate) -> None:
    start = "<|im_start|>system\nReasoning effort is set to "
    assert render(template, [USER], enable_thinking=True).startswith(start + "xhigh.")
    assert render(template, [USER], enable_thinking=True, reasoning_effort="low").startswith(start + "low.")
    medium = render(template, [USER], enable_thinking=True, reasoning_effort="medium")
    assert medium.startswith("<|im_start|>user")
    assert not template.render([USER], [], {"enable_thinking": True, "reasoning_effort": "none"}).thinking


def test_tool_calls_and_results(template: ChatTemplate) -> None:
    arguments = '{"query": "raw <& é", "options": {"z": 1, "a": "é"}, "enabled": true}'
    call = {"id": "1", "type": "function", "function": {"name": "inspect", "arguments": arguments}}
    text = render(
        template,
        [
            USER,
            {"role": "assistant", "reasoning": "use the tool", "content": None, "tool_calls": [call, call]},
            {"role": "tool", "tool_call_id": "1", "content": "first"},
            {"role": "tool", "tool_call_id": "2", "content": [{"type": "text", "text": "second"}]},
            {"role": "assistant", "content": "<think>literal</think>Visible"},
        ],
    )
    for part in (
        "<think>\nuse the tool\n</think>\n\n<tool_call>\n<function=inspect>\n",
        "<parameter=query>\nraw <& é\n</parameter>",
        '<parameter=options>\n{"z": 1, "a": "é"}\n</parameter>',
        "<parameter=enabled>\ntrue\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n",
        "<|im_start|>user\n<tool_response>\nfirst\n</tool_response>\n<tool_response>\nsecond\n",
        "second\n</tool_response><|im_end|>\n",
        "<think>\n\n</think>\n\n<think>literal</think>Visible<|im_end|>",
    ):
        assert part in text, part


def test_thoughts_of_earlier_turns_can_be_dropped(template: ChatTemplate) -> None:
    history = [USER, {"role": "assistant", "reasoning_content": "hmm", "content": "A"}, USER]
    assert "<think>\nhmm\n</think>\n\nA" in render(template, history)
    assert "<think>\n\n</think>\n\nA" in render(template, history, preserve_thinking=False)


def test_media_and_system_parts(template: ChatTemplate) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:x"}}
    rendered = template.render(
        [
            {"role": "developer", "content": [{"type": "text", "text": "Be kind."}]},
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": [image, {"type": "text", "text": "Describe."}]},
        ],
        [{"type": "function", "function": {"name": "f"}}],
        {},
    )
    assert rendered.image_urls == ["data:x"]
    assert "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Describe.<|im_end|>" in rendered.text
    assert '{"type": "function", "function": {"name": "f"}}' in rendered.text
    assert "Be kind.\n\nBe short.<|im_end|>" in rendered.text


@pytest.mark.parametrize("depth", [100, 900, 5_000, 100_000])
def test_deep_arguments_of_old_calls_are_no_fault_of_ours(template: ChatTemplate, depth: int) -> None:
    function = {"name": "f", "arguments": '{"a":' * depth + "1" + "}" * depth}
    messages = [USER, {"role": "assistant", "tool_calls": [{"function": function}]}, USER]
    with suppress(MessageError):
        template.render(messages, [], {})


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": "system", "content": "late"}, "must be at the beginning"),
        ({"role": "owner", "content": "x"}, r"messages\[1\]: unknown role"),
        ({"role": "user", "content": [{"type": "video_file"}]}, r"content\[0\]: parts of type"),
        ({"role": "user", "content": 3}, "string or a list"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "no image URL"),
    ],
)
def test_refusals_name_the_place(template: ChatTemplate, message: dict, reason: str) -> None:
    with pytest.raises(MessageError, match=reason):
        template.render([USER, message], [], {})
