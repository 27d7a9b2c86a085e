"""Keeps tests that share expensive things together when pytest runs in several processes (`-n 2`)."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent
# One stack of services, one checkpoint: the whole folder goes to one process.
SHARED_FOLDERS = {"e2e"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        path = item.path.relative_to(HERE)
        group = path.parts[0] if path.parts[0] in SHARED_FOLDERS else str(path)
        item.add_marker(pytest.mark.xdist_group(group))
