"""The shared-memory plane's native threads. They hold the GIL at their start and at their end, not between.

`serve_bells` waits for rings, answers decode-class lookups itself and queues the rest; `serve_bulk` reads
what is queued, a slice of a session's oldest lookup at a time, sessions in turn. A page that must come from
the drive thus delays a chunk, and never another engine's decode step.

The other side of the memory is not trusted: a ring is received into private memory, ids are copied to private
memory before they are checked and used, and of a slot nothing else is read. Sends never block.
"""

import grpc
import numpy as np
from numba import njit

from ple_daemon.gather import (
    SLICE_ROWS,
    UNKNOWN,
    WINDOW_ROWS,
    Int64Array,
    advise_and_copy,
    are_files_whole,
    copy_slice,
    first_bad,
    read,
)
from ple_daemon.native import (
    MSG_DONTWAIT,
    MSG_NOSIGNAL,
    POLLIN,
    errno,
    load,
    memcpy,
    now_ns,
    poll,
    read_fd,
    recv,
    send,
    store,
    write_fd,
)
from ple_daemon.prefetch_marks import Marks, check_marks
from ple_daemon.shm_board import (
    CLOSING,
    COUNTS_AT,
    IDLE,
    JOBS_AT,
    LATENCY_BUCKETS_NS,
    LIVE,
    MAX_SEATS,
    MAX_SLOTS,
    NUM_COUNTS,
    QUEUED,
    SEATS_AT,
    Control,
    Count,
    Job,
    Seat,
)
from ple_daemon.table import DECODE_MAX_ROWS
from ple_rpc.bell import RING_BYTES

_OK = int(grpc.StatusCode.OK.value[0])
_INVALID = int(grpc.StatusCode.INVALID_ARGUMENT.value[0])
_EXHAUSTED = int(grpc.StatusCode.RESOURCE_EXHAUSTED.value[0])
_CHANGED = int(grpc.StatusCode.FAILED_PRECONDITION.value[0])
_OUT_OF_RANGE = int(grpc.StatusCode.OUT_OF_RANGE.value[0])
_UNAVAILABLE = int(grpc.StatusCode.UNAVAILABLE.value[0])
_DATA_LOSS = int(grpc.StatusCode.DATA_LOSS.value[0])

_WORD = 8
_STOP, _DRAINING = int(Control.STOP), int(Control.DRAINING)
_BELLS_RUN, _BULK_RUNS = int(Control.BELLS_RUN), int(Control.BULK_RUNS)
_BELL_WAKE, _BULK_WAKE = int(Control.BELL_WAKE_FD), int(Control.BULK_WAKE_FD)
_NOTICE, _DOUBTS = int(Control.NOTICE_FD), int(Control.DOUBTS)
_TABLE_ROWS, _ROW_BYTES, _ADVICE = int(Control.ROWS), int(Control.ROW_BYTES), int(Control.ADVICE)
_PIDFD, _FAULTS, _REPAIRED = int(Control.PIDFD), int(Control.FAULTS), int(Control.REPAIRED)
_TABLE_CHANGED, _DECODING = int(Control.CHANGED), int(Control.DECODING)
_TABLE_ADDRESS = int(Control.FIRST_ADDRESS)

_STATE, _FD, _REGION, _SLOTS = int(Seat.STATE), int(Seat.FD), int(Seat.REGION), int(Seat.SLOTS)
_MAX_ROWS, _SLOT_BYTES, _FIRST = int(Seat.MAX_ROWS), int(Seat.SLOT_BYTES), int(Seat.FIRST_SLOT_OFFSET)
_IDS, _ROWS, _DROPPED = int(Seat.IDS_OFFSET), int(Seat.ROWS_OFFSET), int(Seat.DROPPED)
_BELL_GONE, _BULK_GONE = int(Seat.BELL_GONE), int(Seat.BULK_GONE)
_SEAT_BYTES, _SEATS_AT = len(Seat) * _WORD, SEATS_AT * _WORD

_JOB_STATE, _JOB_ROWS, _JOB_SEQUENCE = int(Job.STATE), int(Job.ROWS), int(Job.SEQUENCE)
_JOB_DONE, _JOB_READY, _JOB_STARTED = int(Job.DONE), int(Job.READY), int(Job.STARTED_NS)
_JOB_LAST = int(Job.LAST)
_JOB_BYTES, _JOBS_AT = len(Job) * _WORD, JOBS_AT * _WORD

_COUNT_ROWS, _ADVISED, _READ_ERRORS = int(Count.ROWS), int(Count.ADVISED), int(Count.READ_ERRORS)
_CHECKED, _COLD = int(Count.CHECKED), int(Count.COLD)
_LATENCY, _OUTCOMES, _BUCKETS = int(Count.LATENCY_NS), int(Count.OUTCOMES), int(Count.BUCKETS)
_COUNT_BYTES, _COUNTS_AT = NUM_COUNTS * _WORD, COUNTS_AT * _WORD

# Threads, as rows of the counts.
_BELLS, _BULK = 0, 1
_EINTR, _EAGAIN = 4, 11
_POLL_MS = 1000
_LOW = 0xFFFFFFFF

# Throughout: `board` is the address of the board's words, `seat` and `job` are addresses within it, and their
# fields are read by `load`. Scalars compile in a fraction of the time that arrays in tuples take. Functions
# that are called with constants say their types: numba would compile them for each constant.


@njit("void(int64, int64, int64, int64)", nogil=True, cache=True)
def _count(board: int, thread: int, field: int, amount: int) -> None:
    counts = board + _COUNTS_AT + thread * _COUNT_BYTES
    store(counts, field, load(counts, field) + amount)


@njit("int64(int64, int64, int64)", nogil=True, cache=True)
def _job(board: int, number: int, slot: int) -> int:
    return board + _JOBS_AT + (number * MAX_SLOTS + slot) * _JOB_BYTES


@njit("void(int64, int64)", nogil=True, cache=True)
def _wake(board: int, which: int) -> None:
    one = np.ones(1, np.int64)
    write_fd(load(board, which), one.ctypes.data, _WORD)


@njit("void(int64, int64, int64, int64, int64)", nogil=True, cache=True)
def _answer(board: int, seat: int, slot: int, status: int, sequence: int) -> None:
    """Ring back. A client that does not read, and so fills its socket, loses its region."""
    message = np.empty(2, np.int64)
    message[0] = slot | status << 32
    message[1] = sequence
    while send(load(seat, _FD), message.ctypes.data, RING_BYTES, MSG_DONTWAIT | MSG_NOSIGNAL) != RING_BYTES:
        if errno() != _EINTR:
            store(seat, _DROPPED, 1)
            _wake(board, _NOTICE)
            return


@njit("int64(int64, int64)", nogil=True, cache=True)
def _slot_address(seat: int, slot: int) -> int:
    return int(load(seat, _REGION) + load(seat, _FIRST) + slot * load(seat, _SLOT_BYTES))


@njit("void(int64, int64, int64, int64, int64, int64, int64)", nogil=True, cache=True)
def _finish(
    board: int, seat: int, slot: int, sequence: int, status: int, thread: int, started_ns: int
) -> None:
    """Write the slot's status, then its sequence, count, and ring back."""
    head = _slot_address(seat, slot)
    store(head, 1, status)
    store(head, 0, sequence)
    taken_ns = now_ns() - started_ns
    bucket = 0
    while bucket < len(LATENCY_BUCKETS_NS) and taken_ns > LATENCY_BUCKETS_NS[bucket]:
        bucket += 1
    _count(board, thread, _OUTCOMES + status, 1)
    _count(board, thread, _BUCKETS + bucket, 1)
    _count(board, thread, _LATENCY, taken_ns)
    _answer(board, seat, slot, status, sequence)


@njit("boolean(int64, int64, int64, int64, int64[::1])", nogil=True, cache=True)
def _take_ids(board: int, seat: int, slot: int, first: int, ids: Int64Array) -> bool:
    """Copy ids out of the slot, from its `first` on, and then check them; a bad one becomes the detail."""
    base = _slot_address(seat, slot)
    memcpy(ids.ctypes.data, base + load(seat, _IDS) + first * _WORD, ids.nbytes)
    bad = first_bad(ids, load(board, _TABLE_ROWS))
    store(base, 2, ids[bad] if bad >= 0 else 0)
    return bad < 0


@njit("int64(int64, int64[:, ::1], int64, int64, int64[::1], int64, int64)", nogil=True, cache=True)
def _read_exactly(
    board: int, places: Int64Array, seat: int, slot: int, ids: Int64Array, first: int, thread: int
) -> int:
    """Rows that were copied in doubt, again: a file is short, or the guard has put zeros in its place."""
    base, row_bytes = _slot_address(seat, slot), load(board, _ROW_BYTES)
    index, _ = read(ids, places, row_bytes, base + load(seat, _ROWS) + first * row_bytes)
    store(board, _DOUBTS, load(board, _DOUBTS) + 1)
    _wake(board, _NOTICE)
    if index < 0:
        return _OK
    _count(board, thread, _READ_ERRORS, 1)
    store(base, 2, ids[index])
    return _DATA_LOSS


# -- bells -------------------------------------------------------------------------------------------------


@njit(nogil=True, cache=True)
def serve_bells(board: int, places: Int64Array) -> None:
    """Answer rings until STOP. One ring of a session at a time, so that none can crowd out another."""
    polled = np.empty(MAX_SEATS + 1, np.int64)
    ring = np.empty(4, np.int64)  # room to see that a message is too long
    ids = np.empty(DECODE_MAX_ROWS, np.int64)
    store(board, _BELLS_RUN, 1)
    while load(board, _STOP) == 0:
        for number in range(MAX_SEATS):
            polled[number] = (
                _descriptor(board, board + _SEATS_AT + number * _SEAT_BYTES) & _LOW | POLLIN << 32
            )
        polled[MAX_SEATS] = load(board, _BELL_WAKE) | POLLIN << 32
        if poll(polled.ctypes.data, polled.size, _POLL_MS) <= 0:
            continue
        if polled[MAX_SEATS] >> 48:
            read_fd(load(board, _BELL_WAKE), ring.ctypes.data, _WORD)
        for number in range(MAX_SEATS):
            if polled[number] >> 48:
                _hear(board, places, number, ring, ids)


@njit(nogil=True, cache=True)
def _descriptor(board: int, seat: int) -> int:
    """What to poll for a seat, -1 for nothing. Lets go of a seat that is closing."""
    state = load(seat, _STATE)
    if state == CLOSING and load(seat, _BELL_GONE) == 0:
        store(seat, _BELL_GONE, 1)
        _wake(board, _BULK_WAKE)
    return load(seat, _FD) if state == LIVE and load(seat, _DROPPED) == 0 else -1


@njit(nogil=True, cache=True)
def _hear(board: int, places: Int64Array, number: int, ring: Int64Array, ids: Int64Array) -> None:
    seat = board + _SEATS_AT + number * _SEAT_BYTES
    got = recv(load(seat, _FD), ring.ctypes.data, ring.nbytes, MSG_DONTWAIT)
    if got != RING_BYTES:
        if got >= 0 or (errno() != _EAGAIN and errno() != _EINTR):
            store(seat, _DROPPED, 1)
            _wake(board, _NOTICE)
        return
    started_ns = now_ns()
    slot, rows, sequence = ring[0] & _LOW, ring[0] >> 32 & _LOW, ring[1]
    job = _job(board, number, min(slot, MAX_SLOTS - 1))
    if slot >= load(seat, _SLOTS) or load(job, _JOB_STATE) != IDLE or sequence <= load(job, _JOB_LAST):
        # No such slot, or another lookup owns it, or the ring is an old one: its memory is left alone.
        _count(board, _BELLS, _OUTCOMES + _INVALID, 1)
        _answer(board, seat, slot, _INVALID, sequence)
        return
    store(job, _JOB_LAST, sequence)
    status = _refusal(board, seat, rows)
    if status == _OK and rows > DECODE_MAX_ROWS:
        _queue(board, job, rows, sequence, started_ns)
        return
    if status == _OK:
        status = _decode(board, places, seat, slot, ids[:rows])
    _finish(board, seat, slot, sequence, status, _BELLS, started_ns)


@njit(nogil=True, cache=True)
def _refusal(board: int, seat: int, rows: int) -> int:
    if rows > load(seat, _MAX_ROWS):
        return _EXHAUSTED
    if load(board, _DRAINING):
        return _UNAVAILABLE
    return _CHANGED if load(load(board, _TABLE_CHANGED), 0) else _OK


@njit(nogil=True, cache=True)
def _queue(board: int, job: int, rows: int, sequence: int, started_ns: int) -> None:
    store(job, _JOB_ROWS, rows)
    store(job, _JOB_SEQUENCE, sequence)
    store(job, _JOB_DONE, 0)
    store(job, _JOB_READY, UNKNOWN)
    store(job, _JOB_STARTED, started_ns)
    store(job, _JOB_STATE, QUEUED)
    _wake(board, _BULK_WAKE)


@njit(nogil=True, cache=True)
def _decode(board: int, places: Int64Array, seat: int, slot: int, ids: Int64Array) -> int:
    if not _take_ids(board, seat, slot, 0, ids):
        return _OUT_OF_RANGE
    decoding = load(board, _DECODING)
    store(decoding, 1, 1)
    faults = load(load(board, _FAULTS), 0)
    whole = faults == load(load(board, _REPAIRED), 0) and advise_and_copy(
        ids, places, load(board, _ROW_BYTES), load(board, _ADVICE), load(board, _PIDFD),
        _slot_address(seat, slot) + load(seat, _ROWS),
    )  # fmt: skip
    status = _OK
    if not whole or load(load(board, _FAULTS), 0) != faults:
        status = _read_exactly(board, places, seat, slot, ids, 0, _BELLS)
    store(decoding, 1, 0)
    _count(board, _BELLS, _COUNT_ROWS, ids.size)
    _count(board, _BELLS, _ADVISED, ids.size if load(board, _ADVICE) else 0)
    return status


# -- bulk --------------------------------------------------------------------------------------------------


@njit(nogil=True, cache=True)
def serve_bulk(board: int, places: Int64Array, marks: Marks) -> None:
    """Read queued lookups until STOP. `marks` are those of the rows that were read ahead."""
    ids = np.empty(SLICE_ROWS + WINDOW_ROWS, np.int64)
    scratch = np.empty(1, np.int64)
    last = 0
    store(board, _BULK_RUNS, 1)
    while load(board, _STOP) == 0:
        found = -1
        for step in range(1, MAX_SEATS + 1):
            number = (last + step) % MAX_SEATS
            seat = board + _SEATS_AT + number * _SEAT_BYTES
            state = load(seat, _STATE)
            if state == CLOSING:
                _let_go(board, seat, number)
            if (
                found < 0
                and state == LIVE
                and load(seat, _DROPPED) == 0
                and _oldest(board, seat, number) >= 0
            ):
                found = number
        if found < 0:
            read_fd(load(board, _BULK_WAKE), scratch.ctypes.data, _WORD)  # sleeps until somebody wakes it
            continue
        last = found
        seat = board + _SEATS_AT + found * _SEAT_BYTES
        slot = _oldest(board, seat, found)
        _advance(board, places, marks, seat, slot, _job(board, found, slot), ids)


@njit(nogil=True, cache=True)
def _let_go(board: int, seat: int, number: int) -> None:
    """Let go of a closing seat, once the other thread cannot queue for it any more."""
    if load(seat, _BELL_GONE) == 0 or load(seat, _BULK_GONE) != 0:
        return
    for slot in range(MAX_SLOTS):
        store(_job(board, number, slot), _JOB_STATE, IDLE)
    store(seat, _BULK_GONE, 1)
    _wake(board, _NOTICE)


@njit("int64(int64, int64, int64)", nogil=True, cache=True)
def _oldest(board: int, seat: int, number: int) -> int:
    """The slot whose queued lookup was rung first, or -1."""
    oldest, oldest_ns = -1, 0
    for slot in range(load(seat, _SLOTS)):
        job = _job(board, number, slot)
        if load(job, _JOB_STATE) == QUEUED and (oldest < 0 or load(job, _JOB_STARTED) < oldest_ns):
            oldest, oldest_ns = slot, load(job, _JOB_STARTED)
    return oldest


@njit(nogil=True, cache=True)
def _advance(
    board: int, places: Int64Array, marks: Marks, seat: int, slot: int, job: int, ids: Int64Array
) -> None:
    """Read the next slice of a lookup, and finish the lookup with its last one."""
    done, rows = load(job, _JOB_DONE), load(job, _JOB_ROWS)
    count = min(SLICE_ROWS, rows - done)
    status = _CHANGED
    if load(load(board, _TABLE_CHANGED), 0) == 0:
        ids = ids[: min(ids.size, rows - done)]
        status = _read_slice(board, places, marks, seat, slot, job, ids, count)
    store(job, _JOB_DONE, done + count)
    if status == _OK and done + count < rows:
        return
    sequence, started_ns = load(job, _JOB_SEQUENCE), load(job, _JOB_STARTED)
    store(job, _JOB_STATE, IDLE)
    _finish(board, seat, slot, sequence, status, _BULK, started_ns)


@njit(nogil=True, cache=True)
def _count_cold(board: int, places: Int64Array, marks: Marks, ids: Int64Array) -> None:
    """Count rows that were read ahead and are cold again, of `ids`, which no earlier slice has advised."""
    checked, cold = check_marks(ids, places, load(board, _ROW_BYTES), load(board, _TABLE_ADDRESS), marks)
    if checked:
        _count(board, _BULK, _CHECKED, checked)
        _count(board, _BULK, _COLD, cold)


@njit(nogil=True, cache=True)
def _read_slice(
    board: int, places: Int64Array, marks: Marks, seat: int, slot: int, job: int, ids: Int64Array, count: int
) -> int:
    done, row_bytes = load(job, _JOB_DONE), load(board, _ROW_BYTES)
    if not _take_ids(board, seat, slot, done, ids):
        return _OUT_OF_RANGE
    _count_cold(board, places, marks, ids[WINDOW_ROWS:] if done else ids)
    faults = load(load(board, _FAULTS), 0)
    whole = faults == load(load(board, _REPAIRED), 0)
    if whole:
        ready, advised = copy_slice(
            ids, count, places, row_bytes, load(board, _ADVICE), load(board, _PIDFD),
            _slot_address(seat, slot) + load(seat, _ROWS) + done * row_bytes,
            load(job, _JOB_READY), load(board, _DECODING),
        )  # fmt: skip
        store(job, _JOB_READY, ready)
        _count(board, _BULK, _ADVISED, advised)
        whole = are_files_whole(ids[:count], places)
    _count(board, _BULK, _COUNT_ROWS, count)
    if not whole or load(load(board, _FAULTS), 0) != faults:
        return _read_exactly(board, places, seat, slot, ids[:count], done, _BULK)
    return _OK
