"""What tests of several folders share, also between the processes of `pytest -n 2`."""

import dataclasses
import fcntl
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling

from ple_inference.tiny.config import TinyOptions
from ple_inference.tiny.stamp import is_complete
from ple_inference.tiny.writer import write_checkpoint

# A deadline in wall-clock time for each example fails on a machine that has something else to do.
hypothesis.settings.register_profile("triplex", deadline=None)
hypothesis.settings.load_profile("triplex")

HERE = Path(__file__).parent
# Tests that share a running server or a stack of services go to one process; others, file by file.
GROUPS = {
    "e2e/test_openai_client.py": "stack",
    "e2e/test_restart.py": "stack",
    "inference/test_api.py": "inference server",
    "inference/test_structured_output.py": "inference server",
    "inference/test_restart.py": "inference server",
}


class GroupedScheduling(LoadScopeScheduling):
    """Hands out whole groups. (xdist's own marker for groups does nothing under pytest 9.2.)"""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.split("::", 1)[0].removeprefix("tests/")
        return GROUPS.get(path, path)


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
                write_checkpoint(checkpoint, options, force=False, progress=lambda _: None)
        return checkpoint

    return make


@pytest.fixture(scope="session")
def real_checkpoint(make_checkpoint: Callable[[TinyOptions], Path]) -> Path:
    """What `ple-inference tiny` makes without options, and `make run` serves."""
    return make_checkpoint(TinyOptions())
