"""What tests of several folders share, also between the processes of `pytest -n 2`."""

import fcntl
from collections.abc import Callable
from pathlib import Path

import pytest

from ple_inference.tiny.config import TinyOptions
from ple_inference.tiny.writer import write_checkpoint

HERE = Path(__file__).parent
# Tests that share a running server or a stack of services go to one process; others, file by file.
GROUPS = {
    "e2e/test_openai_client.py": "stack",
    "e2e/test_restart.py": "stack",
    "inference/test_api.py": "inference server",
    "inference/test_structured_output.py": "inference server",
    "inference/test_restart.py": "inference server",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        path = item.path.relative_to(HERE).as_posix()
        item.add_marker(pytest.mark.xdist_group(GROUPS.get(path, path)))


@pytest.fixture(scope="session")
def make_checkpoint(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Callable[[TinyOptions], Path]:
    """Builds each kind of checkpoint once, whichever process asks first. Nobody may write to them."""
    base = tmp_path_factory.getbasetemp()
    folder = base.parent if hasattr(request.config, "workerinput") else base

    def make(options: TinyOptions) -> Path:
        place = (
            folder / f"checkpoint-{options.vocab}-{options.dtype}-{options.table_rows_base}-{options.seed}"
        )
        place.mkdir(exist_ok=True)
        with (place / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            write_checkpoint(place / "triplex-tiny", options, force=False, progress=lambda _: None)
        return place / "triplex-tiny"

    return make


@pytest.fixture(scope="session")
def real_checkpoint(make_checkpoint: Callable[[TinyOptions], Path]) -> Path:
    """What `ple-inference tiny` makes without options, and `make run` serves."""
    return make_checkpoint(TinyOptions())
