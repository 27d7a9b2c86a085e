"""A service dies and comes back: the chat goes on, its tokens unchanged, the other services untouched."""

import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from long_stream import LongStream
from waiting import wait_for

pytestmark = pytest.mark.e2e

MODEL = "triplex-tiny"
TOKENS = 240
PROMPT = "Tell me a long story."
KILLS = 10
STOPS = 2
STOP_S = 5.0


def test_a_chat_survives_killed_and_stopped_daemons(stack, client, metric):
    undisturbed = LongStream(client, PROMPT, TOKENS).finished(120)
    assert len(undisturbed) >= 200
    assert len({token for token, _ in undisturbed}) >= 50
    again = LongStream(client, PROMPT, TOKENS).finished(120)
    assert again == undisturbed, "greedy decoding must repeat itself"

    repeated_before = metric(stack.inference, "ple_inference_table_lookups_repeated_total")
    generation = LongStream(client, PROMPT, TOKENS)
    pace = TOKENS // (KILLS + STOPS + 2)
    for number in range(KILLS + STOPS):
        progress = min((number + 1) * pace, TOKENS - 10)
        wait_for(lambda n=progress: len(generation.tokens) >= n or generation.error, "tokens", 60)
        assert generation.error is None
        daemon = stack.service("ple_daemon")
        daemon.suspend()
        # The engine's next lookup meets a stopped daemon: killed now, it dies with a lookup in flight.
        wait_for(
            lambda: metric(stack.inference, "ple_inference_table_lookups_in_flight") >= 1, "lookup in flight"
        )
        if number % 6 == 5:
            stay_stopped(daemon, STOP_S)
        else:
            daemon.kill()
            wait_for(lambda d=daemon: not d.is_running(), "end of the daemon")
    assert generation.finished(180) == undisturbed
    repeated = metric(stack.inference, "ple_inference_table_lookups_repeated_total") - repeated_before
    assert repeated >= 5


def stay_stopped(process: psutil.Process, duration_s: float) -> None:
    """Leave a stopped process stopped for that long: here the time itself is what is tested."""
    time.sleep(duration_s)
    process.resume()


def test_inference_says_that_it_waits_for_the_table(stack, client):
    generation = LongStream(client, PROMPT, TOKENS)
    wait_for(lambda: len(generation.tokens) > 5, "first tokens")
    daemon = stack.service("ple_daemon")
    daemon.suspend()
    try:
        wait_for(
            lambda: "waiting_for_table" in stack.wait_ready(stack.inference)["reasons"],
            "inference to say waiting_for_table",
            20,
        )
    finally:
        daemon.resume()
    generation.finished(120)
    wait_for(lambda: stack.wait_ready(stack.inference)["reasons"] == [], "inference to be well again")


@pytest.mark.parametrize("name", ["ple_gateway", "ple_inference"])
def test_a_killed_service_leaves_the_others_alone(stack, name):
    others = {"ple_daemon", "ple_inference", "ple_gateway"} - {name}
    before = {other: stack.service(other).pid for other in others}
    victim = stack.service(name)
    victim.kill()
    wait_for(lambda: not victim.is_running(), "end of the service")
    for url in (stack.daemon, stack.inference, stack.gateway):
        stack.wait_ready(url)
    assert {other: stack.service(other).pid for other in others} == before
    assert stack.service(name).pid != victim.pid
    with stack.client() as client:
        answer = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Hi"}], max_tokens=3
        )
    assert answer.usage.completion_tokens == 3


def test_a_scrambled_table_changes_the_tokens(checkpoint, tmp_path, stack, client, scramble, new_stack):
    """The rows that the daemon serves decide the text: without this every other test here proves little."""
    undisturbed = LongStream(client, PROMPT, TOKENS).finished(120)
    scrambled = scramble(checkpoint, tmp_path)
    other = new_stack(scrambled)
    other.start()
    with other.client() as other_client:
        changed = LongStream(other_client, PROMPT, TOKENS).finished(120)
    assert [token for token, _ in changed] != [token for token, _ in undisturbed]


def test_nothing_is_left_after_the_supervisor_is_killed(checkpoint, new_stack):
    """Even kill -9 of `make run` takes the services with it."""
    stack = new_stack(checkpoint)
    stack.launch()
    for name in ("ple_daemon", "ple_inference", "ple_gateway"):
        stack.service(name)
    assert stack.stop(signal.SIGKILL) == -signal.SIGKILL
    wait_for(lambda: stack.processes() == [], "end of every process", 60)


def test_ctrl_c_while_starting_ends_in_order(checkpoint, new_stack):
    """A service that loads or waits for another one still hears SIGTERM."""
    stack = new_stack(checkpoint)
    stack.launch()
    stack.service("ple_inference")
    assert stack.stop() == 0
    assert stack.processes() == []
    assert "SIGKILL" not in (stack.log_dir / "supervisord.log").read_text()


def test_a_second_run_of_the_same_checkout_is_refused(stack):
    second = subprocess.run(stack.command, capture_output=True, text=True, timeout=60)
    assert second.returncode == 1
    assert second.stderr.startswith("triplex: Triplex already runs from this checkout")
    assert len(second.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("--run-dir", "/tmp/" + "r" * 85, "a Unix socket takes 107"),
        ("--run-dir", "/tmp/100%s", "a path with a % in it"),
        ("--log-dir", "/proc/nowhere", "choose one that you can write to with --log-dir"),
    ],
)
def test_what_cannot_be_used_is_one_line(stack, tmp_path: Path, option: str, value: str, reason: str):
    command = [*stack.command]
    command[command.index("--run-dir") + 1] = str(tmp_path / "run")
    command[command.index("--log-dir") + 1] = str(tmp_path / "log")
    command[command.index(option) + 1] = value
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 1
    (line,) = refused.stderr.splitlines()
    assert line.startswith("triplex: ")
    assert reason in line


def test_two_services_need_two_addresses(stack, tmp_path: Path):
    command = [*stack.command, "--run-dir", str(tmp_path / "run"), "--log-dir", str(tmp_path / "log")]
    for service in ("gateway", "inference", "daemon"):
        command += [f"--{service}-address", "127.0.0.1:0"]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 1
    assert "two services have the same address" in refused.stderr


def test_a_taken_port_is_one_line(stack, checkpoint, tmp_path: Path):
    command = [*stack.command]
    command[command.index("--run-dir") + 1] = str(tmp_path / "run")
    command[command.index("--log-dir") + 1] = str(tmp_path / "log")
    refused = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert refused.returncode == 1
    (line,) = refused.stderr.splitlines()
    assert line.startswith("triplex: ")
    assert "is taken" in line
