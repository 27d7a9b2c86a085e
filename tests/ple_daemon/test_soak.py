"""The soak in its short form, and that it would notice."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from conftest import DEADLINE_S, Daemon
from soak import Plan, Soak
from soak_crowd import PROGRAM

# `make soak` kills 50 times each; so many take a minute on two cores.
SHORT = Plan(seed=3, daemon_kills=8, client_kills=12, stop_s=3.0)


def test_a_short_soak(record_property: Callable[[str, object], None]) -> None:
    with tempfile.TemporaryDirectory(prefix="ple-") as folder:
        soak = Soak(SHORT, Path(folder))
        try:
            soak.run()
        finally:
            print(soak.table)
        record_property("table", soak.table)
        assert soak.problems == []


def test_a_client_of_the_soak_notices_wrong_rows(
    start: Callable[..., Daemon], shared_checkpoint: Path, tmp_path: Path
) -> None:
    """This table's rows do not follow the formula."""
    daemon = start(shared_checkpoint).wait_ready()
    report = tmp_path / "report.jsonl"
    command = [sys.executable, PROGRAM, f"unix:{daemon.socket}", report, "1", "4"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as client:
        assert client.wait(DEADLINE_S) == 1
    wrong = json.loads(report.read_text().splitlines()[-1])["wrong"]
    assert len(wrong) == 5
    assert all("rows are wrong, first row" in line for line in wrong)
