"""The restart matrix: services go and come back under two long streams and a queue of others."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest
from crowd import LONG, Crowd, is_prefix
from deployment import CHECKOUT, OTHER_KEY, Deployment
from long_stream import LongStream
from restarts_doc import Row, as_table, write_doc
from waiting import wait_for

NO_PTRACE = Path(__file__).with_name("no-ptrace.yaml")
STOPPED_S = 30.0
PROBE_TOKENS = 16
NEXT_RELEASE = {"TRIPLEX_TAG": "next", "TRIPLEX_REVISION": "next"}


def stop_and_start(deployment: Deployment) -> None:
    deployment.compose("stop", "daemon")
    try:
        wait_for(lambda: _waits_for_table(deployment), "inference that says what it waits for", poll_s=0.1)
        wait_for(
            lambda: deployment.health_outside()["dependencies"]["table"] == "down",
            "the gateway's word of it", poll_s=0.1,
        )  # fmt: skip
        assert deployment.health_outside()["serves"], "requests are held, not refused"
    finally:
        deployment.compose("start", "daemon")


def kill_daemon(deployment: Deployment) -> None:
    restarts = deployment.inspect("daemon")["RestartCount"]
    deployment.kill("daemon")
    wait_for(lambda: deployment.inspect("daemon")["RestartCount"] > restarts, "restart by the engine")


def suspend_daemon(deployment: Deployment) -> None:
    """Here the time itself is what is tested."""
    pid = deployment.pid("daemon")
    os.kill(pid, signal.SIGSTOP)
    until_s = time.monotonic() + STOPPED_S
    try:
        wait_for(lambda: _waits_for_table(deployment), "inference that says what it waits for", poll_s=0.1)
        wait_for(lambda: time.monotonic() > until_s, "end of the stop", 2 * STOPPED_S, 0.2)
    finally:
        os.kill(pid, signal.SIGCONT)


def upgrade_daemon(deployment: Deployment) -> None:
    """As docs/operations.md says; the new image differs by its tag and its labels."""
    deployment.compose("up", "-d", "--no-deps", "--no-build", "daemon", values=NEXT_RELEASE)
    config = deployment.inspect("daemon")["Config"]
    assert config["Image"] == "triplex/ple-daemon:next"
    assert config["Labels"]["org.opencontainers.image.revision"] == "next"


def empty_the_run_directory(deployment: Deployment) -> None:
    """The daemon ends when its sockets are gone, and its restart policy starts one that has them."""
    restarts = deployment.inspect("daemon")["RestartCount"]
    deployment.inside("daemon", "sh", "-c", "rm -f /run/triplex/* /run/triplex/.[!.]*")
    wait_for(lambda: deployment.inspect("daemon")["RestartCount"] > restarts, "restart by the engine")
    assert "somebody removed or replaced the socket" in deployment.logs("daemon")


def restart_gateway(deployment: Deployment) -> None:
    deployment.compose("restart", "gateway")


def restart_inference(deployment: Deployment) -> None:
    """An engine that finishes its requests says that it stops, and so does the gateway of it."""
    with (
        deployment.client(OTHER_KEY) as somebody,
        _endless(somebody) as held,
        deployment.begin("restart", "inference") as restarting,
    ):
        wait_for(lambda: deployment.readyz("inference").get("state") == "stopping", "inference that stops")
        health = deployment.health_inside("inference")
        assert (health["state"], health["reasons"], health["serves"]) == ("stopping", ["draining"], False)
        wait_for(lambda: _engine(deployment) == "stopping", "the gateway's word of it", poll_s=0.1)
        assert "engine: draining" in deployment.health_outside()["reasons"]
        held.close()
        assert restarting.wait(200) == 0


def kill_all(deployment: Deployment) -> None:
    deployment.kill("daemon", "inference", "gateway")


def _endless(client: openai.OpenAI) -> openai.Stream:
    """An answer that keeps the engine from ending before what it says has been read."""
    return client.chat.completions.create(
        model="triplex-tiny",
        messages=[{"role": "user", "content": "Count."}],
        max_tokens=20_000,
        stream=True,
        extra_body={"ignore_eos": True},
    )


def _engine(deployment: Deployment) -> str:
    return deployment.health_outside().get("dependencies", {}).get("engine", "")


def _waits_for_table(deployment: Deployment) -> bool:
    health = deployment.readyz("inference")
    return health.get("state") == "degraded" and "waiting_for_table" in health["reasons"]


@dataclass(frozen=True)
class Case:
    """One row of the matrix."""

    title: str
    disturb: Callable[[Deployment], None]
    restarted: tuple[str, ...] = ("daemon",)

    @property
    def others(self) -> tuple[str, ...]:
        return tuple(s for s in ("daemon", "inference", "gateway") if s not in self.restarted)


CASES = (
    Case("daemon: stop, start", stop_and_start),
    Case("daemon: kill -9", kill_daemon),
    Case(f"daemon: SIGSTOP for {STOPPED_S:.0f} s", suspend_daemon, ()),
    Case("daemon: another image", upgrade_daemon),
    Case("run directory emptied", empty_the_run_directory),
    Case("gateway: restart", restart_gateway, ("gateway",)),
    Case("inference: restart", restart_inference, ("inference",)),
    Case("all three: kill -9 at once", kill_all, ("daemon", "inference", "gateway")),
)


@pytest.fixture(scope="module")
def undisturbed(deployment, client):
    deployment.wait_serving()
    crowd = Crowd(deployment, client)
    tokens = crowd.ended()
    assert crowd.errors() == []
    return tokens


@pytest.fixture(scope="module", autouse=True)
def next_release(deployment):
    """The image to change to, built before anything is disturbed."""
    deployment.compose("build", "--quiet", "daemon", values=NEXT_RELEASE)


@pytest.fixture(scope="module")
def rows() -> Iterator[list[Row]]:
    """What was seen, written into docs/restarts.md when `make restarts-doc` asks for it."""
    found: list[Row] = []
    yield found
    if "TRIPLEX_RESTARTS_DOC" in os.environ and len(found) == len(CASES):
        write_doc(Path(os.environ["TRIPLEX_RESTARTS_DOC"]), found)


@pytest.mark.parametrize("case", CASES, ids=[case.title for case in CASES])
def test_restart(case, deployment, client, undisturbed, rows, record_property):
    deployment.wait_serving()
    others = deployment.starts(*case.others)
    crowd = Crowd(deployment, client)
    began_s = time.monotonic()
    case.disturb(deployment)
    if "daemon" not in case.others:
        assert all(stream.is_alive() or stream.error for stream in crowd.long), "it came after the streams"
    deployment.wait_serving()
    ready_s = time.monotonic() - began_s
    tokens = crowd.ended()
    row = Row(case.title, crowd.seen(), crowd.lost_tokens(undisturbed), crowd.longest_pause_s(), ready_s)
    rows.append(row)
    record_property("table", as_table([row]))
    assert deployment.starts(*case.others) == others, "a service that nobody touched was started again"
    # Nobody got a wrong token; of the daemon's restarts no client heard anything.
    assert all(is_prefix(part, whole) for part, whole in zip(tokens, undisturbed, strict=True))
    assert "ended without a word" not in row.seen
    if {"inference", "gateway"}.isdisjoint(case.restarted):
        assert crowd.errors() == []
        assert tokens == undisturbed
    again = LongStream(client, LONG[0], PROBE_TOKENS).finished(200)
    assert is_prefix(again, undisturbed[0])


def test_the_document_has_every_case():
    """`make restarts-doc` writes it; CI changes nothing in the tree."""
    document = (CHECKOUT / "docs/restarts.md").read_text()
    assert [case.title for case in CASES if f"| {case.title} | " not in document] == []


def test_without_its_capability_the_daemon_falls_back_and_serves(deployment, client, undisturbed):
    """c01: EPERM from the default seccomp profile is one line at the start, not a failure later."""
    deployment.compose("up", "-d", "--no-deps", "--no-build", "--wait", "daemon", overrides=(NO_PTRACE,))
    assert "CapBnd:\t0000000000000000" in deployment.inside("daemon", "cat", "/proc/1/status")
    health = deployment.health_inside("daemon")
    assert health["advice"] == "posix_fadvise"
    assert health["serves"]
    assert any("process_madvise: Operation not permitted" in reason for reason in health["reasons"])
    said = "advice chosen advice=posix_fadvise (process_madvise: Operation not permitted)"
    assert said in deployment.logs("daemon")
    deployment.wait_serving()
    assert is_prefix(LongStream(client, LONG[0], PROBE_TOKENS).finished(200), undisturbed[0])
