"""What tests of several folders share, also between the processes of `pytest -n 2`."""

import dataclasses
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling

from ple_inference.tiny.config import TinyOptions
from ple_inference.tiny.stamp import is_complete

# A deadline in wall-clock time for each example fails on a machine that has something else to do.
hypothesis.settings.register_profile("triplex", deadline=None)
hypothesis.settings.load_profile("triplex")

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # for waiting and its like: import mode "importlib" adds no folder
# Tests that share a running server or a stack of services go to one process; others, file by file.
GROUPS = {
    "containers/test_1_service.py": "containers",
    "containers/test_2_restarts.py": "containers",
    "containers/test_4_health.py": "containers",
    "e2e/test_clients.py": "stack",
    "e2e/test_openai_client.py": "stack",
    "e2e/test_gateway_stack.py": "stack",
    "e2e/test_restart.py": "stack",
    "inference/test_api.py": "inference server",
    "inference/test_structured_output.py": "inference server",
    "inference/test_restart.py": "inference server",
}


# These take minutes and go first: at the end no process works on alone while others have nothing to do.
LONGEST = (
    "stack",
    "inference server",
    "ple_daemon/test_process.py",
    "vllm_plugin/test_row_source.py",
    "inference_vllm/test_plan.py",
    "packaging/test_wheels.py",
    "ple_daemon/test_soak.py",
    "ple_daemon/test_shared_memory_faults.py",
    "vllm_plugin/test_quantized_checkpoints.py",
    "ple_daemon/test_slow_drive.py",
    "ple_daemon/test_remote.py",
)


def group_of(nodeid: str) -> str:
    """What goes to one process whole: a group by name, or a file."""
    path = nodeid.split("::", 1)[0].removeprefix("tests/")
    return GROUPS.get(path, path)


class GroupedScheduling(LoadScopeScheduling):
    """Hands out whole groups. (xdist's own marker for groups does nothing under pytest 9.2.)"""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {group: place for place, group in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(group_of(item.nodeid), len(places)))


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> GroupedScheduling:
    return GroupedScheduling(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Shows the tables that tests recorded, from whichever process they ran in."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == "table":
                terminalreporter.section(report.nodeid)
                terminalreporter.write_line(str(value))


@pytest.fixture(scope="session")
def make_checkpoint(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Callable[[TinyOptions], Path]:
    """Builds each kind of checkpoint once, whichever process asks first. Nobody may write to them."""
    base = tmp_path_factory.getbasetemp()
    folder = base.parent if hasattr(request.config, "workerinput") else base

    def make(options: TinyOptions) -> Path:
        place = folder / "-".join(["checkpoint", *map(str, dataclasses.astuple(options))])
        place.mkdir(exist_ok=True)
        checkpoint = place / "triplex-tiny"
        with (place / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not is_complete(checkpoint, options):
                from ple_inference.tiny.writer import write_checkpoint  # torch: not for who hands tests out

                write_checkpoint(checkpoint, options, force=False, progress=lambda _: None)
        return checkpoint

    return make


@pytest.fixture(scope="session")
def real_checkpoint(make_checkpoint: Callable[[TinyOptions], Path]) -> Path:
    """What `ple-inference tiny` makes without options, and `make run` serves."""
    return make_checkpoint(TinyOptions())


def node_major() -> int:
    """The version of Node on this machine; 0 without one."""
    if not shutil.which("node"):
        return 0
    return int(subprocess.check_output(["node", "-p", "process.versions.node.split('.')[0]"], text=True))


def run_node(
    command: list[str], *, timeout_s: float = 100, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a Node program to its end; with everything that it started it is killed at the deadline."""
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **options,
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            raise AssertionError(f"{command[0]} hangs:\n{out}\n{err}") from None
    return subprocess.CompletedProcess(command, process.returncode, out, err)


@pytest.fixture(scope="session")
def node_clients() -> Path:
    """The folder with the clients of tests/gateway/node, installed by `make var/node/ready`."""
    folder = HERE.parent / "var" / "node"
    if not (folder / "ready").exists():
        if node_major() < 20 and not os.environ.get("CI"):
            pytest.skip("no Node 20 or newer on this machine")
        pytest.fail("the Node clients are not installed; run `make var/node/ready`")
    return folder


@pytest.fixture(scope="session")
def node_openai(node_clients: Path) -> Iterator[Callable[..., dict[str, Any]]]:
    """Lets the official Node SDK talk to a gateway; returns what it got."""
    # Node finds packages beside the program. Each process has a copy of its own: they come and go.
    program = node_clients / f"openai_client_{os.getpid()}.mjs"
    shutil.copy(HERE / "gateway" / "node" / "openai_client.mjs", program)

    def talk(url: str, key: str = "unused", max_tokens: int = 8) -> dict[str, Any]:
        ran = run_node(["node", str(program), f"{url}/v1", key, str(max_tokens)], cwd=node_clients)
        assert ran.returncode == 0, ran.stderr
        return json.loads(ran.stdout)

    yield talk
    program.unlink()


@pytest.fixture
def qwen_code(node_clients: Path, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Lets the qwen-code CLI answer one prompt in a folder of its own, without asking before it acts."""
    home = tmp_path / "home"
    home.mkdir()

    def answer(
        url: str, prompt: str, folder: Path, *options: str, key: str = "unused", max_tokens: int = 512
    ) -> subprocess.CompletedProcess[str]:
        variables = {
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "NO_COLOR": "1",
            "QWEN_CODE_MAX_OUTPUT_TOKENS": str(max_tokens),
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_KEY": key,
            "OPENAI_MODEL": "triplex-tiny",
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": key,
            "ANTHROPIC_MODEL": "triplex-tiny",
        }
        return run_node(
            [
                *(str(node_clients / "node_modules" / ".bin" / "qwen"), "--prompt", prompt),
                *("--approval-mode", "yolo", *(options or ("--auth-type", "openai"))),
            ],
            cwd=folder,
            env=variables,
        )

    return answer
