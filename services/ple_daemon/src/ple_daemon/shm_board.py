"""What Python and the two native threads of the shared-memory plane tell each other: one array of int64.

The threads get its address and nothing else, which keeps their signatures, and so the time that compiling
them takes, small. Each word has one writer at a time. A word that hands something over (a seat's or a job's
STATE, the letting go) is written last, with `store`, and read first, with `load`.
"""

import enum

import numpy as np
from numba import njit

from ple_daemon.gather import Int64Array
from ple_daemon.native import store
from ple_daemon.table import Table

MAX_SEATS = 64
MAX_SLOTS = 16
NUM_CODES = 17  # gRPC's status codes

LATENCY_BUCKETS_NS = (
    10_000, 25_000, 50_000, 100_000, 250_000, 500_000, 1_000_000, 2_500_000, 5_000_000, 10_000_000,
    25_000_000, 100_000_000, 1_000_000_000, 10_000_000_000,
)  # fmt: skip


class Control(enum.IntEnum):
    """Of the plane."""

    STOP = 0
    DRAINING = 1
    BELLS_RUN = 2
    BULK_RUNS = 3
    # eventfds: wake the thread that answers bells, the one that does bulk, and Python.
    BELL_WAKE_FD = 4
    BULK_WAKE_FD = 5
    NOTICE_FD = 6
    # Lookups that a native thread could not just copy: Python repairs the mapping and looks at the files.
    DOUBTS = 7
    # The table: what its kernels take, and addresses of words that change.
    ROWS = 8
    ROW_BYTES = 9
    ADVICE = 10
    PIDFD = 11
    FAULTS = 12
    REPAIRED = 13
    CHANGED = 14
    DECODING = 15
    FIRST_ADDRESS = 16


class Seat(enum.IntEnum):
    """Of one session's region. Python fills a FREE seat, makes it LIVE, and later CLOSING."""

    STATE = 0
    FD = 1
    REGION = 2
    SLOTS = 3
    MAX_ROWS = 4
    SLOT_BYTES = 5
    IDS_OFFSET = 6
    ROWS_OFFSET = 7
    FIRST_SLOT_OFFSET = 8
    # A native thread saw the connection end or misused: it is left alone from then on.
    DROPPED = 9
    # Both threads have let go of a CLOSING seat: Python may unmap.
    BELL_GONE = 10
    BULK_GONE = 11


FREE, LIVE, CLOSING = 0, 1, 2


class Job(enum.IntEnum):
    """Of one slot. The bell thread queues a job, the bulk thread makes it idle again."""

    STATE = 0
    ROWS = 1
    SEQUENCE = 2
    DONE = 3
    READY = 4
    STARTED_NS = 5
    # The newest sequence that the slot has seen.
    LAST = 6


IDLE, QUEUED = 0, 1


class Count(enum.IntEnum):
    """Of one thread (0: bells, 1: bulk). Outcomes by gRPC code and latency buckets follow each other."""

    ROWS = 0
    ADVISED = 1
    READ_ERRORS = 2
    LATENCY_NS = 3
    # Rows read ahead that a bulk lookup came to, a sample, and those of them that were cold again.
    CHECKED = 4
    COLD = 5
    OUTCOMES = 6
    BUCKETS = 6 + NUM_CODES


NUM_COUNTS = Count.BUCKETS + len(LATENCY_BUCKETS_NS) + 1


SEATS_AT = len(Control)
JOBS_AT = SEATS_AT + MAX_SEATS * len(Seat)
COUNTS_AT = JOBS_AT + MAX_SEATS * MAX_SLOTS * len(Job)
_WORDS = COUNTS_AT + 2 * NUM_COUNTS


class Board:
    """The words, and views of them: [Control], [MAX_SEATS, Seat], [MAX_SEATS, MAX_SLOTS, Job], [2, Count]."""

    def __init__(self, table: Table) -> None:
        self.words = np.zeros(_WORDS, np.int64)
        self.control = self.words[:SEATS_AT]
        self.seats = self.words[SEATS_AT:JOBS_AT].reshape(MAX_SEATS, len(Seat))
        self.jobs = self.words[JOBS_AT:COUNTS_AT].reshape(MAX_SEATS, MAX_SLOTS, len(Job))
        self.counts = self.words[COUNTS_AT:].reshape(2, NUM_COUNTS)
        self.control[Control.ROWS :] = (
            table.layout.rows, table.layout.row_bytes,
            table.advisor.code, table.advisor.pidfd, table.faults.ctypes.data, table.repaired.ctypes.data,
            table.watch.changed.ctypes.data, table.gate.active.ctypes.data, table.first_address,
        )  # fmt: skip

    @property
    def address(self) -> int:
        return int(self.words.ctypes.data)

    def publish(self, word: Int64Array, value: int) -> None:
        """Write a word that hands over what was written before it; `word` is a view of one word."""
        _publish(word.ctypes.data, value)


@njit(nogil=True, cache=True)
def _publish(address: int, value: int) -> None:
    store(address, 0, value)
