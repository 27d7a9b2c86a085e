"""deploy/compose.cpu.yaml, started for real by `make test-containers`, in a container engine of its own."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # import mode "importlib" adds no folder

from deployment import Deployment

# Only `make test-containers` sets it: whoever runs pytest has no container engine to spare.
collect_ignore_glob = [] if "TRIPLEX_CONTAINERS" in os.environ else ["test_*.py"]


@pytest.fixture(scope="session")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    one = Deployment(tmp_path_factory.mktemp("deployment"))
    try:
        one.start()
        yield one
    finally:
        one.compose("down", "--volumes", "--timeout", "5", "--remove-orphans")


@pytest.fixture(scope="session")
def client(deployment: Deployment) -> Iterator[openai.OpenAI]:
    with deployment.client() as one:
        yield one
