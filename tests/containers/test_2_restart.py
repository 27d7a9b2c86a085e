"""The daemon's container goes and comes back under two long streams: they have the tokens of a quiet run."""

import os
import signal
from pathlib import Path

import pytest
from long_stream import LongStream
from waiting import wait_for

NO_PTRACE = Path(__file__).with_name("no-ptrace.yaml")
MODEL = "triplex-tiny"
TOKENS = 120
STORIES = ("Tell me a long story.", "Count the stars.")


def both(client) -> list[LongStream]:
    return [LongStream(client, story, TOKENS) for story in STORIES]


@pytest.fixture(scope="module")
def undisturbed(deployment, client):
    tokens = [generation.finished(200) for generation in both(client)]
    assert all(len(each) == TOKENS for each in tokens)
    return tokens


@pytest.fixture
def while_decoding(client):
    """Starts two streams; returns when both are past their first tokens."""

    def start() -> list[LongStream]:
        generations = both(client)
        wait_for(lambda: all(len(g.tokens) >= 10 or g.error for g in generations), "tokens of both streams")
        assert [g.error for g in generations] == [None, None]
        return generations

    return start


def others(deployment) -> list[str]:
    return [deployment.inspect(s, "{{.State.StartedAt}} {{.RestartCount}}") for s in ("inference", "gateway")]


def test_stop_and_start(deployment, while_decoding, undisturbed):
    before = others(deployment)
    generations = while_decoding()
    deployment.compose("stop", "daemon")
    wait_for(
        lambda: "waiting_for_table" in deployment.readyz("inference").get("reasons", []),
        "inference that says what it waits for",
    )
    deployment.compose("start", "daemon")
    assert [generation.finished(200) for generation in generations] == undisturbed
    deployment.wait_healthy("daemon")
    assert others(deployment) == before


def test_kill_from_the_host(deployment, while_decoding, undisturbed):
    """A crash: the engine's restart policy brings the daemon back. (It would not after `compose kill`.)"""
    before = others(deployment)
    restarts = int(deployment.inspect("daemon", "{{.RestartCount}}"))
    generations = while_decoding()
    os.kill(int(deployment.inspect("daemon", "{{.State.Pid}}")), signal.SIGKILL)
    assert [generation.finished(200) for generation in generations] == undisturbed
    assert int(deployment.inspect("daemon", "{{.RestartCount}}")) == restarts + 1
    deployment.wait_healthy("daemon")
    assert others(deployment) == before


def test_without_its_capability_the_daemon_falls_back_and_serves(deployment, client, undisturbed):
    """c01: EPERM from the default seccomp profile is one line at the start, not a failure later."""
    deployment.compose("up", "-d", "--no-deps", "--no-build", "--wait", "daemon", overrides=(NO_PTRACE,))
    assert "CapBnd:\t0000000000000000" in deployment.inside("daemon", "cat", "/proc/1/status")
    health = deployment.readyz("daemon")
    assert health["advice"] == "posix_fadvise"
    assert health["state"] == "ready"
    assert any("process_madvise: Operation not permitted" in reason for reason in health["reasons"])
    assert "advice chosen advice=posix_fadvise (process_madvise: Operation not permitted)" in deployment.logs(
        "daemon"
    )
    assert [generation.finished(200) for generation in both(client)] == undisturbed
