"""The clients of a soak: processes that are killed and replaced, and peers that never read."""

import contextlib
import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from conftest import DEADLINE_S, Daemon, eventually
from shm_peer import Peer

PROGRAM = Path(__file__).with_name("soak_client.py")
# More rings than a socket holds answers for.
_RINGS_AT_ONCE = 500


class Client:
    """One process, and what it last reported."""

    def __init__(
        self, address: str, report: Path, seed: int, slots: int, environment: Mapping[str, str]
    ) -> None:
        self._report = report
        command = [sys.executable, str(PROGRAM), address, str(report), str(seed), str(slots)]
        self._log = report.with_suffix(".log")
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stderr=log, env=os.environ | environment
            )

    @property
    def report(self) -> dict:
        """The last whole line: a kill may cut one."""
        lines = self._report.read_text().split("\n")[:-1] if self._report.exists() else []
        return json.loads(lines[-1]) if lines else {}

    @property
    def log(self) -> str:
        return self._log.read_text()[-2000:]

    def dismiss(self) -> None:
        """Ask it to end."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def kill(self) -> None:
        self.process.kill()
        self.dismiss()
        self.process.wait(DEADLINE_S)


class Crowd:
    """Keeps `size` clients busy. Every third one gets its rows over gRPC."""

    def __init__(
        self,
        address: str,
        folder: Path,
        size: int,
        rng: random.Random,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._address, self._folder, self._size, self._rng = address, folder, size, rng
        self._environment = environment
        self._clients: list[Client] = []
        self._started = 0
        self.totals: Counter[str] = Counter()
        self.longest_s = 0.0
        self.problems: list[str] = []

    def fill(self) -> None:
        while len(self._clients) < self._size:
            slots = 0 if self._started % 3 == 2 else 4
            report = self._folder / f"client-{self._started}.jsonl"
            seed = self._rng.randrange(1 << 30)
            self._clients.append(Client(self._address, report, seed, slots, self._environment))
            self._started += 1

    def kill_one(self) -> None:
        """Kill a client, whatever it is doing, and start another."""
        victim = self._clients.pop(self._rng.randrange(len(self._clients)))
        victim.kill()
        self._add_up(victim)
        self.fill()

    def look(self) -> None:
        """Notice clients that ended by themselves: none should."""
        for client in [client for client in self._clients if client.process.poll() is not None]:
            self._clients.remove(client)
            self._add_up(client)
            self.problems.append(f"a client ended with {client.process.returncode}: {client.log}")
        self.fill()

    def wait_progress(self) -> None:
        """Wait until each client has had more rows than now."""
        before = {client: client.report.get("lookups", 0) for client in self._clients}
        for client, lookups in before.items():
            more = lambda c=client, n=lookups: c.report.get("lookups", 0) > n or c.process.poll()  # noqa: E731
            eventually(more, "rows for every client", 2 * DEADLINE_S)

    def dismiss(self) -> None:
        """Let all of them end."""
        for client in self._clients:
            client.dismiss()
        for client in self._clients:
            status = client.process.wait(2 * DEADLINE_S)
            self._add_up(client)
            if status:
                self.problems.append(f"a client ended with {status}: {client.log}")
        self._clients.clear()

    def close(self) -> None:
        for client in self._clients:
            client.kill()

    def _add_up(self, client: Client) -> None:
        report = client.report
        self.problems += report.pop("wrong", [])
        self.longest_s = max(self.longest_s, report.pop("longest_s", 0.0))
        self.totals.update(report)


class Deaf:
    """Two peers that attach and never read: one rings until it is cut off, one does nothing at all."""

    def __init__(self) -> None:
        self._peers: list[Peer] = []
        self.cut_off = 0

    def attach(self, daemon: Daemon) -> None:
        self.close()
        self._peers = [Peer(daemon), Peer(daemon)]
        loud = self._peers[0]
        loud.put(0, range(16))
        loud.socket.setblocking(False)

    def ring(self) -> None:
        if not self._peers or self._peers[0].socket.fileno() < 0:
            return
        loud = self._peers[0]
        try:
            for _ in range(_RINGS_AT_ONCE):
                loud.ring(0, 16)
        except BlockingIOError:
            pass  # the daemon has not taken the last ones yet
        except OSError:
            self.cut_off += 1
            loud.socket.close()

    def close(self) -> None:
        for peer in self._peers:
            with contextlib.suppress(OSError):
                peer.close()
        self._peers = []
