"""The event splitter: any cut of the bytes gives the same events."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ple_gateway.sse import EventSplitter, EventTooLargeError, frame

LINE_END = st.sampled_from([b"\n", b"\r\n", b"\r"])
TEXT = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), min_size=1, max_size=20)


@given(st.lists(TEXT, max_size=6), LINE_END, st.lists(st.integers(0, 400), max_size=10))
def test_any_cut_gives_the_same_events(texts, end, cuts):
    stream = b"".join(
        b": note" + end + b"data: " + text.encode() + end + b"id: 7" + end * 2 for text in texts
    )
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    splitter = EventSplitter(10_000)
    pieces = [stream[start:stop] for start, stop in pairwise(edges)]
    events = [event for piece in pieces for event in splitter.feed(piece)]
    assert events == [text.encode() for text in texts]


def test_several_data_lines_are_one_event():
    assert list(EventSplitter(100).feed(b"\xef\xbb\xbfdata:a\ndata: b\n\n\n\ndata\n\n")) == [b"a\nb", b""]


def test_an_event_has_a_size_limit():
    splitter = EventSplitter(100)
    try:
        for _ in range(20):
            list(splitter.feed(b"data: 123456789\n"))
    except EventTooLargeError:
        return
    raise AssertionError("no limit")


def test_unfinished_event_is_dropped():
    assert list(EventSplitter(100).feed(b"data: a\n")) == []


def test_frame_has_one_line_for_every_idea_of_a_line():
    assert frame('{"a":"\u2028\u2029\u0085ß"}'.encode()) == b'data: {"a":"\\u2028\\u2029\\u0085\xc3\x9f"}\n\n'
