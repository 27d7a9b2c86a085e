"""Clients that users have, as they are installed: the OpenAI SDK on Node and the qwen-code CLI."""

import pytest
from fake_engine import USAGE, USAGE_CHUNK, Call, chunk, complete, play

DONE = b"[DONE]"


def test_node_sdk(gateway, engine, node_openai):
    engine.script = complete("hel", "lo\u2028")
    got = node_openai(gateway.url)
    assert got["whole"]["text"] == got["streamed"]["text"] == "hello\u2028"
    assert got["streamed"]["usage"] == USAGE
    assert got["streamed"]["finish"] == "stop"
    assert got["events"][0] == "response.created"
    assert got["events"][-1] == "response.completed"
    assert got["refused"] == {"name": "NotFoundError", "status": 404, "code": "model_not_found"}


def calls_tool(name: str, arguments: list[str], call_id: str):
    """The model thinks, says something, and calls a tool, its arguments in pieces."""
    first = {"index": 0, "id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}
    return play(
        chunk({"role": "assistant", "content": ""}),
        chunk({"reasoning": "The file first."}),
        chunk({"content": "I will do that."}),
        chunk({"tool_calls": [first]}),
        *(chunk({"tool_calls": [{"index": 0, "function": {"arguments": text}}]}) for text in arguments),
        chunk({}, "tool_calls"),
        USAGE_CHUNK,
        DONE,
    )


@pytest.mark.parametrize("api", ["openai", "anthropic"])
def test_qwen_code_edits_a_file(gateway, engine, qwen_code, tmp_path, api):
    """A whole loop of tools: read, edit, answer. The history that comes back has everything in its place."""
    folder = tmp_path / "work"
    folder.mkdir()
    file = folder / "greeting.txt"
    file.write_text("Hello wrld, 你好\n")

    def script(call: Call) -> None:
        results = [message for message in call.request["messages"] if message["role"] == "tool"]
        offered = {tool["function"]["name"] for tool in call.request.get("tools", [])}
        if "agent" not in offered and api == "openai":  # a request that the CLI makes beside the conversation
            complete("nothing to remember")(call)
        elif not results:
            calls_tool("read_file", ['{"file_', f'path": "{file}"', "}"], "call_read")(call)
        elif len(results) == 1:
            assert "Hello wrld, 你好" in results[0]["content"]
            edit = f'{{"file_path": "{file}", "old_string": "wrld", "new_string": "world 🎉"}}'
            calls_tool("edit", [*edit], "call_edit")(call)
        else:
            assert [result["tool_call_id"] for result in results] == ["call_read", "call_edit"]
            complete("The greeting ", "is mended.")(call)

    engine.script = script
    # The whole CLI over one API, its minimal mode over the other: each start costs seconds.
    options = [] if api == "openai" else ["--auth-type", "anthropic", "--bare"]
    ran = qwen_code(gateway.url, "Mend the spelling in greeting.txt", folder, *options)
    assert ran.returncode == 0, ran.stderr
    assert "The greeting is mended." in ran.stdout
    assert file.read_text() == "Hello world 🎉, 你好\n"
