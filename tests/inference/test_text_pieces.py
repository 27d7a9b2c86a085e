"""Text that comes in pieces: characters, stop strings, thoughts and tool calls are cut anywhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ple_inference.reference.answer import AnswerParser, Content, Piece, Thought, ToolCall
from ple_inference.reference.stop import StopStrings, unfinished_marker_length
from ple_inference.reference.vocabulary import TextStream, Vocabulary

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {"properties": {"q": {"type": "string"}, "n": {"type": "integer"}}},
        },
    }
]
CALL = (
    "<tool_call>\n<function=look>\n<parameter=q>\n12\n</parameter>\n"
    "<parameter=n>\n12\n</parameter>\n</function>\n</tool_call>"
)
OTHER = "<tool_call>\n<function=other>\n</function>\n</tool_call>"


@pytest.fixture(scope="module")
def vocabulary(tiny_checkpoint: Path) -> Vocabulary:
    return Vocabulary(tiny_checkpoint)


@given(text=st.text(max_size=40))
def test_text_stream_never_shows_half_a_character(vocabulary: Vocabulary, text: str) -> None:
    tokens = [byte for character in text for byte in _utf8(character)]
    stream = TextStream(vocabulary)
    shown = [stream.push(vocabulary.tokenizer.token_to_id(_symbol(vocabulary, byte))) for byte in tokens]
    assert "".join(shown) == text.encode("utf-8", "replace").decode()


def _utf8(character: str) -> bytes:
    return character.encode("utf-8", "replace")


def _symbol(vocabulary: Vocabulary, byte: int) -> str:
    return str(vocabulary.tokenizer.id_to_token(byte))


def test_an_unfinished_character_is_held_and_an_impossible_one_is_replaced(vocabulary: Vocabulary) -> None:
    stream = TextStream(vocabulary)
    assert [stream.push(byte) for byte in "é".encode()] == ["", "é"]
    assert stream.push(0xE2) == ""
    assert stream.push(ord("a")) == "\ufffda"


def test_special_tokens_are_silent_and_markers_are_text(vocabulary: Vocabulary) -> None:
    assert vocabulary.bytes_of(502) == b""
    assert vocabulary.literal_bytes_of(502) == b"<|im_end|>"
    assert vocabulary.bytes_of(509) == b"</think>"


pieces_of = st.lists(st.text("ab<|", max_size=4), max_size=12)


@given(pieces=pieces_of, stops=st.lists(st.text("ab<|", min_size=1, max_size=3), max_size=3))
def test_stop_strings_show_exactly_what_is_before_the_first(pieces: list[str], stops: list[str]) -> None:
    matcher, shown, stopped = StopStrings(tuple(stops)), "", False
    for piece in pieces:
        text, stopped = matcher.push(piece)
        shown += text
        # Nothing of a stop string is ever shown, whatever comes next.
        assert not any(stop in shown for stop in stops)
        if stopped:
            break
    whole = "".join(pieces)
    ends = [whole.find(stop) for stop in stops if stop in whole]
    if stopped:
        assert ends
        assert whole.startswith(shown)
    else:
        assert not ends
        assert shown + matcher.flush() == whole


def test_stop_strings_may_be_unarmed() -> None:
    matcher = StopStrings(("ab",))
    assert matcher.push("xab", armed=False) == ("xab", False)
    assert matcher.push("a") == ("", False)
    assert matcher.push("b") == ("", True)


def test_unfinished_marker_is_the_longest() -> None:
    assert unfinished_marker_length("x<too", ["<tool_call>", "oo"]) == 4
    assert unfinished_marker_length("", ["<"]) == 0
    assert unfinished_marker_length("<", ["<"]) == 0


def parse(pieces: list[str], *, thinking: bool, tools: list[dict] = TOOLS) -> list[Piece]:
    parser = AnswerParser(thinking=thinking, tools=tools)
    found = [piece for text in pieces for piece in parser.push(text)]
    return _merge([*found, *parser.finish()])


def _merge(pieces: list[Piece]) -> list[Piece]:
    merged: list[Piece] = []
    for piece in pieces:
        last = merged[-1] if merged else None
        if isinstance(piece, Thought | Content) and isinstance(last, type(piece)):
            merged[-1] = type(piece)(last.text + piece.text)
        else:
            merged.append(piece)
    return merged


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({place % (len(text) + 1) for place in places})
    return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]


@given(st.lists(st.integers(0, 1000), max_size=30))
def test_an_answer_is_the_same_however_it_is_cut(places: list[int]) -> None:
    text = f"Let me see.\n\n</think>\n\nI look:\n\n{CALL}\n{CALL}"
    thought, content, *calls = parse(cut(text, places), thinking=True)
    assert thought == Thought("Let me see.")
    assert content == Content("I look:")
    assert [(call.name, json.loads(call.arguments)) for call in calls if isinstance(call, ToolCall)] == [
        ("look", {"q": "12", "n": 12})
    ] * 2
    assert len({call.id for call in calls}) == 2


@pytest.mark.parametrize("text", ["a <tool_call> b", OTHER, "x\n\n"])
def test_what_is_no_call_stays_text(text: str) -> None:
    assert parse(list(text), thinking=False) == [Content(text)]


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "[" * 100_000, "1" * 5000, "{"])
def test_arguments_are_json_whatever_a_value_looks_like(value: str) -> None:
    call = f"<tool_call>\n<function=look>\n<parameter=n>\n{value}\n</parameter>\n</function>\n</tool_call>"
    (found,) = parse([call], thinking=False)
    assert isinstance(found, ToolCall)
    assert json.loads(found.arguments, parse_constant=pytest.fail) == {"n": value}


def test_without_tools_nothing_is_a_call() -> None:
    assert parse([CALL], thinking=False, tools=[]) == [Content(CALL)]


def test_thoughts_that_never_end_are_thoughts() -> None:
    assert parse(list("deep </thin"), thinking=True) == [Thought("deep </thin")]
