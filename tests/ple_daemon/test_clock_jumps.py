"""Wall clocks that jump, under the daemon and under its clients: nothing waits for them.

A library that is preloaded shifts what a process is told. The machine's own clock is left alone.
"""

import random
import shutil
import signal
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import Daemon, eventually
from soak_crowd import Crowd
from soak_table import DerivedRows

SOURCE = Path(__file__).with_name("wall_clock.c")
COMPILER = shutil.which("cc")
DAY_S = 86_400
JUMPS_S = (400 * DAY_S, -2 * 365 * DAY_S, 0)

pytestmark = pytest.mark.skipif(COMPILER is None, reason="shifting a process's clock takes a C compiler")


class WallClock:
    """What processes with `environment` take for the time of day."""

    def __init__(self, folder: Path) -> None:
        library, self._shift = folder / "wall_clock.so", folder / "shift"
        command = [COMPILER, "-shared", "-fPIC", "-Wall", "-Werror", "-o", library, SOURCE, "-ldl"]
        subprocess.run(command, check=True, timeout=60)
        self.jump(0)
        self.environment = {"LD_PRELOAD": str(library), "WALL_CLOCK_FILE": str(self._shift)}

    def jump(self, shift_s: int) -> None:
        """Seconds from the machine's time, from now on."""
        mode = "r+b" if self._shift.exists() else "wb"
        with self._shift.open(mode) as file:
            file.write(struct.pack("=q", shift_s))


@pytest.fixture
def clock(tmp_path: Path) -> WallClock:
    return WallClock(tmp_path)


@pytest.fixture
def crowd(run_dir: Path, tmp_path: Path, clock: WallClock) -> Iterator[Crowd]:
    made = Crowd(f"unix:{run_dir / 'table.sock'}", tmp_path, 3, random.Random(5), clock.environment)
    yield made
    made.close()


def test_jumps_of_the_wall_clock_do_not_matter(
    start: Callable[..., Daemon], tmp_path: Path, clock: WallClock, crowd: Crowd
) -> None:
    table = DerivedRows().write(tmp_path / "table")
    daemon = start(table, **clock.environment).wait_ready()
    since = daemon.health()[1]["since"]
    crowd.fill()
    crowd.wait_progress()
    for shift_s in JUMPS_S:
        clock.jump(shift_s)
        crowd.wait_progress()
        crowd.look()
    clock.jump(JUMPS_S[0])
    daemon.signal(signal.SIGKILL)
    daemon.wait()
    clock.jump(JUMPS_S[1])  # while the clients wait for it
    daemon = start(table, **clock.environment).wait_ready()
    assert daemon.health()[1]["since"] < since, "the daemon does not see the shifted clock"
    crowd.wait_progress()
    crowd.dismiss()
    assert crowd.problems == []
    assert crowd.totals["prefetches"] > 0
    assert daemon.health()[1]["state"] == "ready"
    eventually(lambda: daemon.metric("ple_daemon_sessions") == 0, "sessions gone")
    daemon.signal(signal.SIGTERM)
    assert daemon.wait() == 0
