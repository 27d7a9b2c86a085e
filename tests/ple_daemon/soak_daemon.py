"""The daemon of a soak: killed, stopped and started again at random times, and what it leaves behind."""

import os
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from conftest import DEADLINE_S, Daemon, eventually

from ple_rpc.lookup_stream import LookupStream
from ple_rpc.table.v1.table_service_pb2 import LookupRequest

# Few, so that a daemon that loses threads of its pool soon has none.
MAX_CALLS = 32


@dataclass(frozen=True, slots=True)
class Holdings:
    """What a process holds."""

    fds: int
    threads: int
    regions: int

    @classmethod
    def of(cls, pid: int) -> "Holdings":
        process = Path(f"/proc/{pid}")
        maps = (process / "maps").read_text()
        counts = [len(list((process / name).iterdir())) for name in ("fd", "task")]
        return cls(*counts, maps.count("memfd:"))


class MortalDaemon:
    """Call `tick` often: it kills, stops and restarts when it is time. It never waits for the daemon."""

    def __init__(
        self, table: Path, run_dir: Path, logs: Path, rng: random.Random, stop_after_kills: int, stop_s: float
    ) -> None:
        """Instead of one kill after `stop_after_kills` it gets SIGSTOP, and SIGCONT `stop_s` later."""
        self._table, self._run_dir, self._logs, self._rng = table, run_dir, logs, rng
        self._stop_after_kills, self._stop_s = stop_after_kills, stop_s
        self._due_s: float | None = None
        self._is_stopped = False
        self.starts = self.kills = self.kills_in_start = self.stops = 0
        self.current: Daemon | None = None

    @property
    def address(self) -> str:
        return f"unix:{self._run_dir / 'table.sock'}"

    def start(self) -> Daemon:
        log = self._logs / f"daemon-{self.starts}.log"
        self.starts += 1
        options = ["--max-concurrent-calls", str(MAX_CALLS)]
        self.current = Daemon([str(self._table), *options], self._run_dir, log, {})
        return self.current

    def tick(self) -> Daemon | None:
        """Do what is due; the daemon, when it has just become ready."""
        now_s, daemon = time.monotonic(), self.current
        is_due = self._due_s is not None and now_s >= self._due_s
        if daemon is None:
            if is_due:
                self._restart(now_s)
            return None
        assert daemon.process.poll() is None, f"the daemon ended by itself:\n{daemon.log[-2000:]}"
        if is_due:
            self._harm(daemon, now_s)
        elif self._due_s is None and "ready socket=" in daemon.log:
            self._due_s = now_s + self._rng.uniform(0.3, 2.5)
            return daemon
        return None

    def spare(self) -> Daemon:
        """No more harm is done: the daemon, up and running."""
        self._due_s = None
        daemon = self.current or self.start()
        return daemon.wait_ready()

    def close(self) -> None:
        if self.current is not None:
            self.current.close()

    def _restart(self, now_s: float) -> None:
        self.start()
        # One in five does not live to see a client.
        self._due_s = now_s + self._rng.uniform(0.0, 1.5) if self._rng.random() < 0.2 else None

    def _harm(self, daemon: Daemon, now_s: float) -> None:
        if self._is_stopped:
            daemon.signal(signal.SIGCONT)
            self._is_stopped, self._due_s = False, now_s + self._rng.uniform(1.0, 3.0)
        elif self.kills >= self._stop_after_kills and not self.stops and "ready socket=" in daemon.log:
            daemon.signal(signal.SIGSTOP)
            self.stops += 1
            self._is_stopped, self._due_s = True, now_s + self._stop_s
        else:
            self._kill(daemon, now_s)

    def _kill(self, daemon: Daemon, now_s: float) -> None:
        self.kills += 1
        self.kills_in_start += "ready socket=" not in daemon.log
        daemon.close()
        self._make_cold()
        self.current, self._due_s = None, now_s + self._rng.uniform(0.0, 0.5)

    def _make_cold(self) -> None:
        """Drop the table from the page cache, as nobody has it mapped now."""
        for path in self._table.iterdir():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def settled(daemon: Daemon) -> Holdings:
    """What the daemon holds when nobody is attached, nothing is prefetched, and its pool has all its threads.

    A pool makes threads as calls need them and keeps them: only full pools compare.
    """
    for name in ("sessions", "shm_regions", "prefetch_queue", "prefetch_active"):
        eventually(lambda n=name: daemon.metric(f"ple_daemon_{n}") == 0, f"no {name} left")
    streams = [LookupStream(daemon.stub.LookupStream) for _ in range(MAX_CALLS)]
    for stream in streams:  # an open stream holds a thread
        stream.lookup([LookupRequest(row_ids_le64=bytes(8))], DEADLINE_S)
    for stream in streams:
        stream.close()
    return Holdings.of(daemon.process.pid)
