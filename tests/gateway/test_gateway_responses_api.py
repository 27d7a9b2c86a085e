"""OpenAI's Responses API without state, with the official client and beside it."""

import json
from contextlib import contextmanager

import openai
import pydantic
import pytest
from fake_engine import DONE, USAGE, USAGE_CHUNK, answer, chunk, complete, message, once, play
from hypothesis import given, settings
from hypothesis import strategies as st

from ple_gateway.errors import GatewayError
from ple_gateway.messages import Conversation
from ple_gateway.openai_responses.request import chat_request

TOOL = {
    "type": "function",
    "name": "look",
    "description": "Looks.",
    "strict": False,
    "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
}


@pytest.fixture
def client(gateway):
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="unused", max_retries=0, timeout=10) as client:
        yield client


def post(gateway, **fields):
    return gateway.request("POST", "/v1/responses", {"model": "triplex-tiny", "input": "hi", **fields})


def events_of(answered):
    """Events, checked for their names and numbers."""
    events = []
    for block in answered.body.decode().strip().split("\n\n"):
        name, data = block.split("\n", 1)
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def calls(*deltas):
    return chunk({"tool_calls": list(deltas)})


def test_response(client, engine):
    engine.script = complete("hello")
    got = client.responses.create(
        model="triplex-tiny", input="hi", instructions="Be brief.", store=True, max_output_tokens=9
    )
    assert got.output_text == "hello"
    assert got.status == "completed"
    assert got.store is False
    assert got.instructions == "Be brief."
    assert got.usage.input_tokens == USAGE["prompt_tokens"]
    assert got.usage.input_tokens_details.cached_tokens == 1
    assert got.usage.total_tokens == USAGE["total_tokens"]
    sent = engine.calls[-1].request
    assert engine.calls[-1].path == "/v1/chat/completions"
    assert sent == {
        "model": "triplex-tiny",
        "max_completion_tokens": 9,
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}],
    }


def test_events_come_in_their_order(gateway, engine):
    engine.script = play(
        chunk({"role": "assistant", "content": ""}),
        chunk({"reasoning": "hm"}),
        chunk({"content": "I "}),
        chunk({"content": "look."}),
        calls({"index": 0, "id": "c1", "type": "function", "function": {"name": "look", "arguments": ""}}),
        calls({"index": 0, "function": {"arguments": '{"at": '}}),
        calls({"index": 1, "id": "c2", "type": "function", "function": {"name": "look", "arguments": "{}"}}),
        calls({"index": 0, "function": {"arguments": '"x"}'}}),
        chunk({}, "tool_calls"),
        USAGE_CHUNK,
        DONE,
    )
    answered = post(gateway, stream=True, tools=[TOOL])
    events = events_of(answered)
    assert [(event["type"].removeprefix("response."), event.get("output_index")) for event in events] == [
        ("created", None),
        ("in_progress", None),
        ("output_item.added", 0),
        ("content_part.added", 0),
        ("reasoning_text.delta", 0),
        ("reasoning_text.done", 0),
        ("content_part.done", 0),
        ("output_item.done", 0),
        ("output_item.added", 1),
        ("content_part.added", 1),
        ("output_text.delta", 1),
        ("output_text.delta", 1),
        ("output_text.done", 1),
        ("content_part.done", 1),
        ("output_item.done", 1),
        ("output_item.added", 2),
        ("function_call_arguments.delta", 2),
        ("output_item.added", 3),
        ("function_call_arguments.delta", 3),
        ("function_call_arguments.delta", 2),
        ("function_call_arguments.done", 2),
        ("output_item.done", 2),
        ("function_call_arguments.done", 3),
        ("output_item.done", 3),
        ("completed", None),
    ]
    final = events[-1]["response"]
    assert final["output"] == [event["item"] for event in events if event["type"].endswith("item.done")]
    assert [item["type"] for item in final["output"]] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    assert final["output"][2]["arguments"] == '{"at": "x"}'
    assert {event["response"]["id"] for event in events if "response" in event} == {final["id"]}
    assert final["usage"]["output_tokens"] == USAGE["completion_tokens"]
    assert b"[DONE]" not in answered.body


def test_sdk_puts_a_stream_together(client, engine):
    engine.script = play(
        chunk({"reasoning": "hm"}),
        chunk({"content": "I look.\u2028"}),
        calls({"index": 0, "id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}),
        chunk({}, "tool_calls"),
        USAGE_CHUNK,
        DONE,
    )
    tool = {**TOOL, "strict": True, "parameters": {"type": "object", "properties": {}, "required": []}}
    tool["parameters"]["additionalProperties"] = False
    with client.responses.stream(model="triplex-tiny", input="hi", tools=[tool]) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[-1] == "response.completed"
    assert final.output_text == "I look.\u2028"
    assert final.output[-1].parsed_arguments == {}


def test_tool_loop_with_the_history_that_came_back(client, engine):
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at":"x"}'}}
    engine.script = answer(200, message("I look.", "tool_calls", tool_calls=[call], reasoning="hm"))
    history = [{"role": "user", "content": [{"type": "input_text", "text": "look"}]}]
    first = client.responses.create(model="triplex-tiny", input=history, tools=[TOOL], tool_choice="required")
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
    engine.script = complete("done")
    history += [item.model_dump(mode="json", exclude_none=True) for item in first.output]
    history.append({"type": "function_call_output", "call_id": "c1", "output": "saw x"})
    assert client.responses.create(model="triplex-tiny", input=history, tools=[TOOL]).output_text == "done"
    user, turn, tool = engine.calls[-1].request["messages"]
    assert user == {"role": "user", "content": "look"}
    assert turn == {
        "role": "assistant",
        "content": "I look.",
        "reasoning": "hm",
        "reasoning_content": "hm",
        "tool_calls": [call],
    }
    assert tool == {"role": "tool", "tool_call_id": "c1", "content": "saw x"}


def test_items_of_one_turn_become_one_message_and_others_do_not():
    def call(name):
        return {"type": "function_call", "call_id": name, "name": "look", "arguments": "{}"}

    def result(name):
        return {
            "type": "function_call_output",
            "call_id": name,
            "output": [{"type": "input_text", "text": "r"}],
        }

    items = [
        {"role": "developer", "content": "rules"},
        {"role": "user", "content": "q"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]},
        call("a"),
        call("b"),
        result("a"),
        result("b"),
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "one"}]},
        {"type": "message", "role": "assistant", "content": "two"},
        {"type": "reasoning", "summary": [], "encrypted_content": "x"},
        {"role": "user", "content": "more"},
    ]
    request, origins = chat_request({"input": items})
    sent = Conversation(request["messages"], origins).messages
    assert [message["role"] for message in sent] == [
        *("system", "user", "assistant", "tool", "tool", "assistant", "assistant", "user"),
    ]
    assert sent[2]["reasoning"] == "s"
    assert [call["id"] for call in sent[2]["tool_calls"]] == ["a", "b"]
    assert [message["content"] for message in sent[3:]] == ["r", "r", "one", "two", "more"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [TOOL, {"type": "custom", "name": "apply_patch"}]}, "tools[1]"),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools[0]"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": ["x"]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"type": "computer_call"}]}, "input[0]"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]},
            "input[0].content[0]",
        ),
        ({"instructions": 5}, "instructions"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 5}, "temperature"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "response_format"),
    ],
)
def test_refusals_name_the_place(gateway, engine, fields, param):
    refused = post(gateway, **fields)
    assert (refused.status, refused.error["param"]) == (400, param)
    assert not engine.calls


def test_previous_response_id_is_refused_with_what_to_do(client):
    with pytest.raises(openai.BadRequestError, match="send the whole history in `input`"):
        client.responses.create(model="triplex-tiny", input="x", previous_response_id="resp_1")


def test_cut_answers_are_incomplete(gateway, engine):
    engine.script = complete("half", finish="length")
    got = post(gateway).json
    assert got["status"] == "incomplete"
    assert got["incomplete_details"] == {"reason": "max_output_tokens"}
    assert got["output"][0]["status"] == "incomplete"
    events = events_of(post(gateway, stream=True))
    assert events[-1]["type"] == "response.incomplete"
    assert events[-1]["response"]["output"][0]["status"] == "incomplete"


@pytest.mark.parametrize("begun", [True, False])
def test_failures_in_a_stream_end_it_as_failed(gateway, engine, begun):
    engine.script = play(*([chunk({"content": "some"})] if begun else []), lambda call: call.cut())
    events = events_of(post(gateway, stream=True))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["status"] == "failed"
    assert events[-1]["response"]["error"]["code"] == "backend_unavailable"


def test_waiting_clients_get_comments(start_gateway, engine):
    gateway = start_gateway(commit_delay_s=0.05, keepalive_interval_s=0.05)
    engine.script = once(
        lambda: gateway.metric("keepalive_comments_total") >= 2, "two were sent", complete("x")
    )
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="unused", max_retries=0, timeout=10) as client:
        events = list(client.responses.create(model="triplex-tiny", input="hi", stream=True))
    assert events[-1].response.output_text == "x"


def test_structured_output(client, gateway, engine):
    class Person(pydantic.BaseModel):
        name: str

    engine.script = complete('{"name": "Ada"}')
    parsed = client.responses.parse(model="triplex-tiny", input="who?", text_format=Person)
    assert parsed.output_parsed == Person(name="Ada")
    form = engine.calls[-1].request["response_format"]
    assert form["json_schema"]["name"] == "Person"
    assert form["json_schema"]["strict"] is True
    engine.script = complete("no JSON")
    with pytest.raises(openai.InternalServerError):
        client.responses.parse(model="triplex-tiny", input="who?", text_format=Person)


def test_choices_of_tools(gateway, engine):
    engine.script = complete("x")
    other = {**TOOL, "name": "other"}
    post(gateway, tools=[TOOL, other], tool_choice={"type": "function", "name": "look"})
    assert engine.calls[-1].request["tool_choice"] == {"type": "function", "function": {"name": "look"}}
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "other"}]}
    post(gateway, tools=[TOOL, other], tool_choice=allowed, reasoning={"effort": "low"})
    sent = engine.calls[-1].request
    assert [tool["function"]["name"] for tool in sent["tools"]] == ["other"]
    assert sent["tool_choice"] == "auto"
    assert sent["reasoning_effort"] == "low"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=10,
)
ITEM = st.fixed_dictionaries(
    {"type": st.sampled_from(["message", "reasoning", "function_call", "function_call_output", "x"])},
    optional=dict.fromkeys(["content", "summary", "call_id", "name", "arguments", "output"], JSON)
    | {"role": st.sampled_from(["user", "assistant", "developer", "x"])},
)
FIELDS = ["instructions", "tools", "tool_choice", "reasoning", "text", "stream", "max_output_tokens"]


@contextmanager
def suppress_400():
    """Anything but a 400 is a failure."""
    try:
        yield
    except GatewayError as error:
        if error.status != 400:
            raise


@settings(max_examples=80)
@given(st.lists(ITEM | JSON, max_size=5) | JSON, st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4))
def test_any_request_is_accepted_or_refused_with_a_400(items, fields):
    with suppress_400():
        request, origins = chat_request({"input": items, **fields})
        assert len(origins) == len(request["messages"])
        Conversation(request["messages"], origins)
