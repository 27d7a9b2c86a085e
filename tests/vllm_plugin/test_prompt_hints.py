"""Which prompts the daemon hears of, and when it hears that they are over."""

from ple_inference.vllm_plugin.prompt_hints import PromptHints


class Sink:
    def __init__(self) -> None:
        self.heard: list[tuple] = []

    def prefetch(self, request_id, tokens, context, epoch) -> None:
        self.heard.append(("prefetch", request_id, list(tokens), list(context), epoch))

    def cancel_prefetch(self, request_id, epoch) -> None:
        self.heard.append(("cancel", request_id, epoch))


def test_a_prompt_is_hinted_from_where_the_cache_ends() -> None:
    sink = Sink()
    hints = PromptHints(sink, context_length=2)
    hints.admit("new", [5, 6, 7, 8], computed=0)
    hints.admit("one", [5, 6, 7, 8], computed=1)
    hints.admit("hit", [5, 6, 7, 8], computed=3)
    assert [heard[2:4] for heard in sink.heard] == [([5, 6, 7, 8], []), ([6, 7, 8], [5]), ([8], [6, 7])]


def test_nothing_is_left_to_read() -> None:
    sink = Sink()
    hints = PromptHints(sink, context_length=2)
    hints.admit("all", [5, 6], computed=2)
    hints.drop("all")
    hints.drop("never seen")
    assert sink.heard == []


def test_a_resumed_request_has_a_newer_epoch_and_is_dropped_once() -> None:
    sink = Sink()
    hints = PromptHints(sink, context_length=2)
    hints.admit("a", [1, 2, 3], computed=0)
    hints.admit("b", [1, 2, 3], computed=0)
    hints.drop("a")
    hints.admit("a", [1, 2, 3, 4], computed=2)
    hints.drop("a")
    hints.drop("a")
    epochs = [heard[-1] for heard in sink.heard if heard[1] == "a"]
    assert [heard[0] for heard in sink.heard if heard[1] == "a"] == [
        "prefetch",
        "cancel",
        "prefetch",
        "cancel",
    ]
    assert epochs[0] == epochs[1] < epochs[2] == epochs[3]
