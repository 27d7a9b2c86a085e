"""A worker that waits is seen by another process."""

import subprocess
import sys
import threading
from pathlib import Path

from ple_inference.vllm_plugin.table_wait import TableWait, WaitReporter

READER = """
import sys, pathlib
from ple_inference.vllm_plugin.table_wait import TableWait
wait = TableWait(pathlib.Path(sys.argv[1]))
print(wait.waiting_since_s, wait.lookups)
"""


def seen_elsewhere(path: Path) -> str:
    return subprocess.check_output([sys.executable, "-c", READER, path], text=True, timeout=60).strip()


def test_another_process_reads_what_one_writes(tmp_path: Path) -> None:
    path = tmp_path / "wait"
    writer = TableWait(path, create=True)
    assert seen_elsewhere(path) == "None 0"
    writer.write(1234.5, 7)
    assert seen_elsewhere(path) == "1234.5 7"
    writer.write(None, 8)
    assert seen_elsewhere(path) == "None 8"
    writer.close()


def test_the_reporter_follows_the_client(tmp_path: Path) -> None:
    path = tmp_path / "wait"
    asked = threading.Semaphore(0)
    progress: list[tuple[float | None, int]] = [(None, 3)]

    def look() -> tuple[float | None, int]:
        asked.release()
        return progress[0]

    def twice() -> None:  # the first look's outcome is written before the second look
        assert asked.acquire(timeout=30)
        assert asked.acquire(timeout=30)

    reporter = WaitReporter(path, look)
    try:
        twice()
        reader = TableWait(path)
        assert (reader.waiting_since_s, reader.lookups) == (None, 3)
        progress[0] = (99.0, 3)
        twice()
        assert asked.acquire(timeout=30)
        assert reader.waiting_since_s == 99.0
    finally:
        reporter.close()
