"""What holds for all tests.

Tests that share expensive things stay together when pytest runs in several processes (`-n 2`).
"""

from pathlib import Path

import hypothesis
import pytest

# A deadline in wall-clock time for each example fails on a machine that has something else to do.
hypothesis.settings.register_profile("triplex", deadline=None)
hypothesis.settings.load_profile("triplex")

HERE = Path(__file__).parent
# One stack of services, one checkpoint: the whole folder goes to one process.
SHARED_FOLDERS = {"e2e"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        path = item.path.relative_to(HERE)
        group = path.parts[0] if path.parts[0] in SHARED_FOLDERS else str(path)
        item.add_marker(pytest.mark.xdist_group(group))
