"""The soak: clients at work while the daemon and they themselves are killed at random.

    python tests/ple_daemon/soak.py [--seed N]      (make soak)

Every row is checked against a formula, and at the end the daemon must hold what it held before the first
client came. A run with the same seed makes the same choices; how they meet in time differs.
"""

import argparse
import random
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from conftest import DEADLINE_S, Daemon
from soak_crowd import Crowd, Deaf
from soak_daemon import Holdings, MortalDaemon, settled
from soak_table import DerivedRows
from tqdm import tqdm

_LOOK_S = 0.02


@dataclass(frozen=True, slots=True)
class Plan:
    """How much of it. `stop_s` is how long the daemon is once stopped (SIGSTOP) and then continued."""

    seed: int
    daemon_kills: int = 50
    client_kills: int = 50
    clients: int = 8
    stop_s: float = 30.0


class Soak:
    """One run; `table` and `problems` tell afterwards."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        """`folder` takes the table, logs and reports, and must have a path short enough for sockets."""
        self._plan = plan
        rng = random.Random(plan.seed)
        table = DerivedRows(seed=plan.seed).write(folder / "table")
        self._daemon = MortalDaemon(table, folder / "run", folder, rng, plan.daemon_kills // 2, plan.stop_s)
        self._crowd = Crowd(self._daemon.address, folder, plan.clients, random.Random(plan.seed + 1))
        self._deaf = Deaf()
        self._rng = random.Random(plan.seed + 2)
        self._client_kills = 0
        self._next_client_kill_s = 0.0
        self._started_s = time.monotonic()
        self._before: Holdings | None = None
        self._after: Holdings | None = None

    def run(self) -> None:
        """Raises AssertionError when something that must happen does not."""
        with ExitStack() as stack:
            for part in (self._daemon, self._crowd, self._deaf):
                stack.callback(part.close)
            self._before = settled(self._daemon.start().wait_ready())
            self._crowd.fill()
            self._crowd.wait_progress()
            with tqdm(
                total=self._plan.daemon_kills + self._plan.client_kills, unit="kill", disable=None
            ) as bar:
                self._kill_both(bar)
                daemon = self._daemon.spare()
                self._deaf.attach(daemon)
                self._kill_clients(bar)
            self._crowd.wait_progress()
            self._crowd.dismiss()
            self._deaf.close()
            self._compare(daemon)

    @property
    def problems(self) -> list[str]:
        """What was wrong with rows, clients, or what is left."""
        found = list(self._crowd.problems)
        if self._before != self._after:
            found.append(f"left behind: {self._before} before the first client, {self._after} at the end")
        return found

    @property
    def table(self) -> str:
        """What was done and seen, in lines."""
        totals, killed, before, after = self._crowd.totals, self._daemon, self._before, self._after
        lines: list[tuple[str, object]] = [
            ("seed", self._plan.seed),
            ("seconds", round(time.monotonic() - self._started_s)),
            ("daemon killed", f"{killed.kills} times, {killed.kills_in_start} before it was ready"),
            ("daemon stopped", f"{killed.stops} times for {self._plan.stop_s:g} s"),
            ("clients killed", f"{self._client_kills} times, {self._plan.clients} at once"),
            ("cut off, never read", self._deaf.cut_off),
            ("lookups", f"{totals['lookups']:,}, {totals['slots']:,} of them left in a slot"),
            ("rows checked", f"{totals['rows']:,}"),
            ("hints sent", f"{totals['prefetches']:,}"),
            ("lookups sent again", totals["repeated"]),
            ("reconnects", totals["reconnects"]),
            ("longest lookup", f"{self._crowd.longest_s:.1f} s"),
            ("problems", len(self.problems)),
        ]
        if before is not None and after is not None:
            for name in Holdings.__dataclass_fields__:
                lines.append((f"{name} before, after", f"{getattr(before, name)}, {getattr(after, name)}"))
        return "\n".join(f"{name:22} {value}" for name, value in lines)

    def _kill_both(self, bar: tqdm) -> None:
        # A third of the clients' deaths is for the last daemon, which has to clear up after them.
        until = self._plan.client_kills * 2 // 3
        while self._daemon.kills < self._plan.daemon_kills:
            ready = self._daemon.tick()
            if ready is not None:
                self._deaf.attach(ready)
            self._live_on(until, bar)

    def _kill_clients(self, bar: tqdm) -> None:
        while self._client_kills < self._plan.client_kills:
            self._live_on(self._plan.client_kills, bar)

    def _live_on(self, kill_until: int, bar: tqdm) -> None:
        self._deaf.ring()
        self._crowd.look()
        assert not self._crowd.problems, self._crowd.problems
        now_s = time.monotonic()
        if self._client_kills < kill_until and now_s >= self._next_client_kill_s:
            self._crowd.kill_one()
            self._client_kills += 1
            self._next_client_kill_s = now_s + self._rng.uniform(0.2, 4.0)
        bar.update(self._daemon.kills + self._client_kills - bar.n)
        time.sleep(_LOOK_S)

    def _compare(self, daemon: Daemon) -> None:
        """See what the daemon holds, once it has closed the connections of the dead."""
        self._after = settled(daemon)
        deadline_s = time.monotonic() + DEADLINE_S
        while self._after != self._before and time.monotonic() < deadline_s:
            time.sleep(_LOOK_S)
            self._after = Holdings.of(daemon.process.pid)


def main() -> int:
    parser = argparse.ArgumentParser(description="Soak the PLE daemon; exit code 1 when anything was wrong.")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 20))
    parser.add_argument("--daemon-kills", type=int, default=50)
    parser.add_argument("--client-kills", type=int, default=50)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--stop-s", type=float, default=30.0, help="how long the daemon is stopped, once")
    plan = Plan(**vars(parser.parse_args()))
    print(f"seed {plan.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="ple-") as folder:
        soak = Soak(plan, Path(folder))
        try:
            soak.run()
        finally:
            print(soak.table)
            for problem in soak.problems:
                print(problem)
    return 1 if soak.problems else 0


if __name__ == "__main__":
    sys.exit(main())
