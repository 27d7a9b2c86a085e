"""One client process of the soak: random lookups and prefetches, each row checked, until stdin ends.

    python soak_client.py ADDRESS REPORT SEED SLOTS

Appends a line of JSON to REPORT every so often and at the end: what was done, and all that was wrong.
"""

import json
import select
import sys
import time
from pathlib import Path

import numpy as np
from soak_table import ROW_BYTES, rows_of

from ple_rpc.client import ClientOptions, TableClient
from ple_rpc.errors import LookupCancelled, NotOffered, TableError

_REPORT_S = 0.2
# Between two lookups, as between the steps of an engine.
_MAX_PAUSE_S = 0.02
_MAX_WRONG = 5


class Worker:
    """Makes up work by a seed, and keeps count."""

    def __init__(self, client: TableClient, report: Path, seed: int) -> None:
        self._client = client
        self._report = report
        self._rng = np.random.default_rng(seed)
        self._reported_s = 0.0
        self._lookups = self._rows = self._slots = self._prompts = 0
        self._longest_s = 0.0
        self._wrong: list[str] = []

    def run(self) -> bool:
        """Work until stdin ends; whether all rows were right."""
        while not is_over() and len(self._wrong) < _MAX_WRONG:
            if self._rng.random() < 0.15:
                self._hint()
            else:
                self._look_up()
            if time.monotonic() - self._reported_s > _REPORT_S:
                self._tell()
            time.sleep(self._rng.uniform(0, _MAX_PAUSE_S))  # an engine's step, not a wait for anything
        self._tell()
        return not self._wrong

    def _hint(self) -> None:
        self._prompts += 1
        name = f"r{self._prompts % 7}"
        if self._rng.random() < 0.3:
            self._client.cancel_prefetch(name, self._prompts)
        else:
            tokens = self._rng.integers(0, 512, self._rng.integers(1, 500)).tolist()
            self._client.prefetch(name, tokens, epoch=self._prompts)

    def _look_up(self) -> None:
        kind = self._rng.random()
        most = 64 if kind < 0.65 else 3000 if kind < 0.97 else 12_000
        ids = self._rng.integers(0, self._client.description.rows, self._rng.integers(1, most))
        started_s = time.monotonic()
        try:
            rows = self._from_slot(ids) if kind < 0.3 else self._into_buffer(ids)
        except LookupCancelled:
            return
        except TableError as error:
            self._wrong.append(f"{len(ids)} rows: {type(error).__name__}: {error}")
            return
        self._longest_s = max(self._longest_s, time.monotonic() - started_s)
        self._check(ids, rows)

    def _into_buffer(self, ids: np.ndarray) -> np.ndarray:
        out = np.full((len(ids), ROW_BYTES), 0xA5, np.uint8)
        self._client.lookup(ids, out, cancelled=is_over)
        return out

    def _from_slot(self, ids: np.ndarray) -> np.ndarray:
        """As a GPU engine takes them: copied out of the slot, which is then given back."""
        try:
            slot = self._client.lookup_into_slot(ids, cancelled=is_over)
        except NotOffered:  # over gRPC
            return self._into_buffer(ids)
        rows = np.frombuffer(bytes(slot.rows), np.uint8).reshape(len(ids), ROW_BYTES)
        slot.release()
        self._slots += 1
        return rows

    def _check(self, ids: np.ndarray, rows: np.ndarray) -> None:
        self._lookups += 1
        self._rows += len(ids)
        wrong = np.flatnonzero((rows != rows_of(ids)).any(axis=1))
        if len(wrong):
            first = wrong[0]
            content = bytes(rows[first]).hex()
            self._wrong.append(
                f"{len(wrong)} of {len(ids)} rows are wrong, first row {ids[first]}: {content}"
            )

    def _tell(self) -> None:
        self._reported_s = time.monotonic()
        stats = self._client.stats
        line = {
            "lookups": self._lookups, "rows": self._rows, "slots": self._slots,
            "prefetches": stats.prefetches_sent, "repeated": stats.lookups_repeated,
            "reconnects": stats.reconnects, "longest_s": self._longest_s, "wrong": self._wrong,
        }  # fmt: skip
        with self._report.open("a") as file:
            file.write(json.dumps(line) + "\n")


def is_over() -> bool:
    """Whether stdin ended: the soak wants this client to go, or is gone itself."""
    return bool(select.select([sys.stdin], [], [], 0)[0])


def main(address: str, report: str, seed: str, slots: str) -> int:
    options = ClientOptions(
        client_name=f"soak-{seed}", slots=int(slots), max_rows_per_slot=4096, hang_check_s=0.5
    )
    with TableClient(address, options) as client:
        return 0 if Worker(client, Path(report), int(seed)).run() else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
