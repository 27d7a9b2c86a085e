"""Tool calls: whatever the engine says, clients get one form, or are told that a call is broken."""

import json
from itertools import pairwise

import pytest
from fake_engine import DONE, answer, chunk, message, play
from hypothesis import given
from hypothesis import strategies as st

from ple_gateway.think_marker import ThinkMarkerFilter
from ple_gateway.tool_calls import ToolCallRelay
from ple_gateway.tool_markup import MarkupWatch

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "write",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}, "lines": {"type": "integer"}},
            },
        },
    },
    {"type": "function", "function": {"name": "look"}},
]
SCHEMAS = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in TOOLS}
ARGUMENTS = json.dumps({"path": "grüße/你好 🎉.txt", "lines": 3}, ensure_ascii=False)


def delta(index=0, call_id=None, name=None, arguments=None):
    function = {key: value for key, value in (("name", name), ("arguments", arguments)) if value is not None}
    call = {"index": index, "function": function}
    return {**call, "id": call_id, "type": "function"} if call_id else call


def calls_chunk(*deltas):
    return chunk({"tool_calls": list(deltas)})


def stream_calls(gateway, engine, *steps, finish="tool_calls", **fields):
    """Stream these events; the calls as a client puts them together, and the finish reason."""
    engine.script = play(*steps, chunk({}, finish), DONE)
    answered = gateway.chat(stream=True, tools=TOOLS, **fields)
    assert answered.events[-1] == "[DONE]"
    return put_together(answered.events[:-1])


def put_together(events):
    """Collect calls as strict clients do: the first delta of an index has all, later ones arguments only."""
    calls = []
    reasons = []
    for event in events:
        for choice in event["choices"]:
            reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
            for call in choice["delta"].get("tool_calls", []):
                if call["index"] == len(calls):
                    assert set(call) == {"index", "id", "type", "function"}
                    assert call["id"]
                    assert call["type"] == "function"
                    calls.append({"id": call["id"], **call["function"]})
                else:
                    assert set(call) == {"index", "function"}
                    assert set(call["function"]) == {"arguments"}
                    calls[call["index"]]["arguments"] += call["function"]["arguments"]
    assert len(reasons) == 1
    assert len({call["id"] for call in calls}) == len(calls)
    return [(call["name"], call["arguments"]) for call in calls], reasons[0]


def test_g28_one_byte_chunks_in_tool_arguments(gateway, engine):
    events = [calls_chunk(delta(0, "c", "write", "")), calls_chunk(delta(0, arguments=ARGUMENTS))]

    def trickle(call):
        for event in events:
            call.trickle(b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\r\n\r\n")

    assert stream_calls(gateway, engine, trickle) == ([("write", ARGUMENTS)], "tool_calls")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (ARGUMENTS, "tool_calls"),
        ("", "tool_calls"),
        ("null", "tool_calls"),
        (ARGUMENTS[:-5], "length"),
        ('{"path": "a\\', "length"),
        ("[1]", "length"),
        ("{'path': 1}", "length"),
    ],
)
def test_g38_arguments_parse_or_the_answer_was_cut(gateway, engine, arguments, reason):
    got, finish = stream_calls(gateway, engine, calls_chunk(delta(0, "c", "write", arguments)))
    assert finish == reason
    assert got == [("write", arguments or "{}")]
    whole = {"id": "c", "type": "function", "function": {"name": "write", "arguments": arguments}}
    engine.script = answer(200, message(None, "tool_calls", tool_calls=[whole]))
    choice = gateway.chat(tools=TOOLS).json["choices"][0]
    assert choice["finish_reason"] == reason
    assert choice["message"]["content"] is None
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == (arguments or "{}")
    broken = gateway.metric("answer_repairs_total", kind="broken_arguments")
    assert broken == (2 if reason == "length" else 0)


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "write"}}])
@pytest.mark.parametrize("engine_reason", ["stop", "tool_calls"])
def test_g39_finish_reason_of_forced_calls(gateway, engine, streamed, choice, engine_reason):
    """Engines end a forced call with either; clients that loop over calls look for one."""
    if streamed:
        steps = calls_chunk(delta(0, "c", "write", ARGUMENTS))
        reason = stream_calls(gateway, engine, steps, finish=engine_reason, tool_choice=choice)[1]
    else:
        call = {"id": "c", "type": "function", "function": {"name": "write", "arguments": ARGUMENTS}}
        engine.script = answer(200, message("", engine_reason, tool_calls=[call]))
        reason = gateway.chat(tools=TOOLS, tool_choice=choice).json["choices"][0]["finish_reason"]
    assert reason == "tool_calls"
    assert engine.calls[-1].request["tool_choice"] == choice


def test_g39_no_calls_are_no_tool_calls(gateway, engine):
    assert stream_calls(gateway, engine, chunk({"content": "no"})) == ([], "stop")
    call = calls_chunk(delta(0, "c", "write", '{"pa'))
    assert stream_calls(gateway, engine, call, finish="length") == ([("write", '{"pa')], "length")


HERMES = '<tool_call>\n{"name": "write", "arguments": {"path": "a", "lines": 3}}\n</tool_call>'
CODER = (
    "<tool_call>\n<function=write>\n<parameter=path>\na\n</parameter>\n<parameter=lines>\n3\n</parameter>\n"
    "</function>\n</tool_call>"
)
BARE = "<function=write><parameter=path>a</parameter><parameter=lines>3</parameter></function>"


@pytest.mark.parametrize("markup", [HERMES, CODER, BARE, CODER + "\n" + HERMES])
@pytest.mark.parametrize("streamed", [True, False])
def test_g40_calls_left_in_the_text_become_calls(gateway, engine, markup, streamed):
    text = f"I write it.\n{markup}\n"
    expected = ("write", '{"path":"a","lines":3}')
    if streamed:
        engine.script = play(*(chunk({"content": char}) for char in text), chunk({}, "stop"), DONE)
        answered = gateway.chat(stream=True, tools=TOOLS)
        calls, reason = put_together(answered.events[:-1])
        said = answered.text
    else:
        engine.script = answer(200, message(text))
        choice = gateway.chat(tools=TOOLS).json["choices"][0]
        reason, said = choice["finish_reason"], choice["message"]["content"]
        calls = [tuple(call["function"].values()) for call in choice["message"]["tool_calls"]]
    assert reason == "tool_calls"
    assert set(calls) == {expected}
    assert said.strip() == "I write it."
    assert gateway.metric("answer_repairs_total", kind="tool_markup_repaired") == 1


@pytest.mark.parametrize(
    "text",
    [
        "Write <tool_call> to call a tool.",
        "Example: <function=other>\n</function>",
        f"{CODER}\nThis is how a call looks.",
        CODER[:-30],
        "<tool_call>{broken}</tool_call>",
        "a < b, <tool",
    ],
)
def test_g40_text_that_is_no_call_stays_text(gateway, engine, text):
    engine.script = play(*(chunk({"content": char}) for char in text), chunk({}, "stop"), DONE)
    answered = gateway.chat(stream=True, tools=TOOLS)
    assert answered.text == text
    assert put_together(answered.events[:-1]) == ([], "stop")
    seen = gateway.metric("answer_repairs_total", kind="tool_markup")
    assert seen == (0 if text.endswith("<tool") else 1)


def test_g40_an_answer_that_was_cut_keeps_its_text(gateway, engine):
    engine.script = play(chunk({"content": CODER}), chunk({}, "length"), DONE)
    answered = gateway.chat(stream=True, tools=TOOLS)
    assert answered.text == CODER
    assert put_together(answered.events[:-1]) == ([], "length")


def test_g40_without_tools_nothing_is_looked_for(gateway, engine):
    engine.script = play(chunk({"content": CODER}), chunk({}, "stop"), DONE)
    assert gateway.chat(stream=True).text == CODER
    assert gateway.chat(stream=True, tools=TOOLS, tool_choice="none").text == CODER


def test_g40_repair_can_be_off(start_gateway, engine):
    gateway = start_gateway(tool_markup="report")
    engine.script = play(chunk({"content": CODER}), chunk({}, "stop"), DONE)
    answered = gateway.chat(stream=True, tools=TOOLS)
    assert answered.text == CODER
    assert gateway.metric("answer_repairs_total", kind="tool_markup") == 1


def test_g40_calls_left_in_thoughts_are_counted(gateway, engine):
    engine.script = play(
        chunk({"reasoning": f"hm {CODER}"}), chunk({"content": "x"}), chunk({}, "stop"), DONE
    )
    assert gateway.chat(stream=True, tools=TOOLS).text == "x"
    assert gateway.metric("answer_repairs_total", kind="tool_markup_in_reasoning") == 1


def test_g41_arguments_in_one_big_delta(gateway, engine):
    arguments = json.dumps({"path": "x" * 300_000})
    assert stream_calls(gateway, engine, calls_chunk(delta(0, "c", "write", arguments))) == (
        [("write", arguments)],
        "tool_calls",
    )


PERMUTATIONS = {
    "no index": [{"id": "a", "function": {"name": "write", "arguments": ARGUMENTS}}],
    "index from 1": [delta(1, "a", "write", ""), delta(1, arguments=ARGUMENTS)],
    "no id": [{"index": 0, "function": {"name": "write", "arguments": ARGUMENTS}}],
    "id in every delta": [delta(0, "a", "write", ARGUMENTS[:9]), delta(0, "a", "write", ARGUMENTS[9:])],
    "name after arguments": [
        delta(0, "a", arguments=ARGUMENTS[:9]),
        delta(0, name="write", arguments=ARGUMENTS[9:]),
    ],
    "null fields": [
        {"index": 0, "id": "a", "type": None, "function": {"name": "write", "arguments": None}},
        {"index": 0, "id": None, "type": None, "function": {"name": None, "arguments": ARGUMENTS}},
    ],
    "arguments as an object": [
        {"index": 0, "id": "a", "function": {"name": "write", "arguments": json.loads(ARGUMENTS)}}
    ],
    "no function": [delta(0, "a", "write", ARGUMENTS), {"index": 0}],
    "id in every delta and no index": [
        {"id": "a", "function": {"name": "write", "arguments": ARGUMENTS[:9]}},
        {"id": "a", "function": {"name": "write", "arguments": ARGUMENTS[9:]}},
    ],
    "rest without index": [delta(0, "a", "write", ARGUMENTS[:9]), {"function": {"arguments": ARGUMENTS[9:]}}],
}


@pytest.mark.parametrize("name", PERMUTATIONS)
def test_deltas_of_any_form(gateway, engine, name):
    deltas = PERMUTATIONS[name]
    got, reason = stream_calls(gateway, engine, *map(calls_chunk, deltas))
    assert [(name, json.loads(arguments)) for name, arguments in got] == [("write", json.loads(ARGUMENTS))]
    assert reason == "tool_calls"


def test_two_calls_on_one_index_and_with_one_id(gateway, engine):
    same_index = [delta(0, "a", "look", "{}"), delta(0, "b", "write", ARGUMENTS)]
    assert stream_calls(gateway, engine, *map(calls_chunk, same_index)) == (
        [("look", "{}"), ("write", ARGUMENTS)],
        "tool_calls",
    )
    same_id = [delta(0, "a", "look", "{}"), delta(1, "a", "write", ARGUMENTS)]
    assert len(stream_calls(gateway, engine, *map(calls_chunk, same_id))[0]) == 2
    assert gateway.metric("answer_repairs_total", kind="call_id") == 1


def test_call_without_a_name_is_not_told(gateway, engine):
    nameless = [delta(0, "a", arguments="{}"), delta(1, "b", "look", "{}")]
    assert stream_calls(gateway, engine, *map(calls_chunk, nameless)) == ([("look", "{}")], "length")
    assert gateway.metric("answer_repairs_total", kind="nameless_call") == 1


CALLS = st.lists(st.tuples(st.sampled_from(["write", "look"]), st.text(max_size=12)), min_size=1, max_size=4)


@given(CALLS, st.data())
def test_calls_survive_any_cut_and_any_interleaving(calls, data):
    """Each call's deltas in order, calls mixed in any way: every call comes out whole, in its order."""
    texts = [json.dumps({"value": value}, ensure_ascii=False) for _, value in calls]
    pieces = []
    for index, text in enumerate(texts):
        cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
        bounds = [0, *cuts, len(text)]
        begun = [delta(index, f"id{index}", calls[index][0], "")]
        pieces.append(begun + [delta(index, arguments=text[a:b]) for a, b in pairwise(bounds)])
    notes = []
    relay = ToolCallRelay(notes.append)
    events = []
    order = []
    while any(pieces):
        index = data.draw(st.sampled_from([i for i, queue in enumerate(pieces) if queue]))
        order += [index] if index not in order else []
        sent = relay.take([pieces[index].pop(0)])
        events.append({"choices": [{"delta": {"tool_calls": sent}, "finish_reason": None}]})
    last, whole = relay.finish()
    events.append({"choices": [{"delta": {"tool_calls": last}, "finish_reason": "tool_calls"}]})
    got, _ = put_together(events)
    assert whole
    assert not notes
    assert got == [(calls[index][0], texts[index]) for index in order]


TAGS = [
    *("<tool_call>", "</tool_call>", "<function=", "write>", "<function=write>", "</function>"),
    "\n",
    "{",
    "x",
]


@given(st.lists(st.sampled_from(TAGS) | st.text(max_size=3), max_size=12), st.data())
def test_held_text_is_never_lost(tags, data):
    """Whatever the text is and however it is cut: what comes out is all of it, or ends in calls."""
    text = "".join(tags)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    bounds = [0, *cuts, len(text)]
    watch = MarkupWatch(SCHEMAS, hold=True)
    released = "".join(watch.feed(text[a:b]) for a, b in pairwise(bounds))
    rest, calls = watch.finish()
    assert released + rest == text
    assert all(call.name in SCHEMAS for call in calls)


@pytest.mark.parametrize("head", ['<tool_call>{"a":"', "<function=write>"])
def test_text_that_never_becomes_a_call_is_not_held_for_ever(head):
    watch = MarkupWatch(SCHEMAS, hold=True)
    pieces = [head, *["x</function>"] * 200]
    released = [watch.feed(piece) for piece in pieces]
    assert released[0] == released[1] == ""
    assert released[-1] == pieces[-1]
    assert "".join(released) + watch.finish()[0] == "".join(pieces)


@given(st.dictionaries(st.text(max_size=4), st.text(max_size=8)), st.data())
def test_think_markers_go_but_not_out_of_strings(value, data):
    text = json.dumps({**value, "</think>": "a</think>b"}, ensure_ascii=False)
    marked = f"</think>{text}</think>"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(marked)), max_size=6)))
    bounds = [0, *cuts, len(marked)]
    markers = ThinkMarkerFilter()
    got = "".join(markers.feed(marked[a:b]) for a, b in pairwise(bounds))
    assert got + markers.finish() == text
    assert markers.found


@pytest.mark.parametrize("streamed", [True, False])
def test_g25_think_markers_leave_json(gateway, engine, streamed):
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    texts = ["\n</thi", 'nk>\n\n{"a": "</think>"', "}"]
    if streamed:
        engine.script = play(*(chunk({"content": text}) for text in texts), chunk({}, "stop"), DONE)
        got = gateway.chat(stream=True, response_format=form).text
    else:
        engine.script = answer(200, message("".join(texts)))
        got = gateway.chat(response_format=form).json["choices"][0]["message"]["content"]
    assert json.loads(got) == {"a": "</think>"}
    assert gateway.metric("answer_repairs_total", kind="think_marker") == 1
