"""One lookup through a lent region, in native code: what a CUDA stream calls between two copies.

A host function may call nothing of CUDA, and a Python one would wait for the interpreter's lock. So this
rings, waits for the answer and returns when the rows are in the slot. When they do not come it says so on a
descriptor and sleeps on another until somebody has put them there: the stream never goes on without rows.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
from numba import carray, cfunc, njit, types  # type: ignore[attr-defined]

OK, MISSED = 1, 2
WORDS = 16


class Word(IntEnum):
    """Of a slot's record, int64 [WORDS]. The caller fills the first six before each call."""

    BELL_FD = 0
    RING = 1  # slot, and rows in the upper half
    SEQUENCE = 2
    TIMEOUT_NS = 3
    NOTICE_FD = 4  # an eventfd: written when rows are missed
    RESUME_FD = 5  # an eventfd: read until the missed rows are there
    STATE = 6
    TAKEN_NS = 7
    SENT = 8  # two words: the message as it is sent
    HEARD = 10  # three words: room to see that an answer is too long
    CLOCK = 13  # two words
    EVENT = 15


_BELL, _RING, _SEQUENCE, _TIMEOUT = (
    Word.BELL_FD.value,
    Word.RING.value,
    Word.SEQUENCE.value,
    Word.TIMEOUT_NS.value,
)
_NOTICE, _RESUME, _STATE, _TAKEN = (
    Word.NOTICE_FD.value,
    Word.RESUME_FD.value,
    Word.STATE.value,
    Word.TAKEN_NS.value,
)
_SENT, _HEARD, _CLOCK, _EVENT = Word.SENT.value, Word.HEARD.value, Word.CLOCK.value, Word.EVENT.value
_BYTES = 8
_MESSAGE_BYTES = 16
_LOW = 0xFFFFFFFF
_NOSIGNAL = 0x4000
_EINTR, _EAGAIN = 4, 11
_MONOTONIC = 1

_int64, _int32 = types.int64, types.int32
_send: Any = types.ExternalFunction("send", _int64(_int32, _int64, _int64, _int32))
_recv: Any = types.ExternalFunction("recv", _int64(_int32, _int64, _int64, _int32))
_read: Any = types.ExternalFunction("read", _int64(_int32, _int64, _int64))
_write: Any = types.ExternalFunction("write", _int64(_int32, _int64, _int64))
_clock_gettime: Any = types.ExternalFunction("clock_gettime", _int32(_int32, _int64))
_errno_location: Any = types.ExternalFunction("__errno_location", types.CPointer(_int32)())


@njit
def _now_ns(words: np.ndarray) -> int:
    _clock_gettime(_MONOTONIC, words.ctypes.data + _CLOCK * _BYTES)
    return words[_CLOCK] * 1_000_000_000 + words[_CLOCK + 1]


@njit
def _hear(words: np.ndarray, begin_ns: int) -> bool:
    """Whether the daemon answers this ring with OK in time. Answers to earlier rings are passed over."""
    while True:
        got = _recv(words[_BELL], words.ctypes.data + _HEARD * _BYTES, 3 * _BYTES, 0)
        if got == _MESSAGE_BYTES:
            if words[_HEARD] & _LOW == words[_RING] & _LOW and words[_HEARD + 1] == words[_SEQUENCE]:
                return words[_HEARD] >> 32 == 0
        elif got >= 0 or (
            carray(_errno_location(), 1)[0] != _EAGAIN and carray(_errno_location(), 1)[0] != _EINTR
        ):
            return False
        if _now_ns(words) - begin_ns > words[_TIMEOUT]:
            return False


@cfunc(types.void(types.CPointer(_int64)))  # compiled at import, in a second: a cache needs a folder
def look_up(record: Any) -> None:
    """The host function; `record` is the address of a slot's record."""
    words = carray(record, WORDS)
    begin_ns = _now_ns(words)
    words[_SENT], words[_SENT + 1] = words[_RING], words[_SEQUENCE]
    sent = _send(words[_BELL], words.ctypes.data + _SENT * _BYTES, _MESSAGE_BYTES, _NOSIGNAL)
    if sent == _MESSAGE_BYTES and _hear(words, begin_ns):
        words[_STATE] = OK
    else:
        words[_STATE] = MISSED
        words[_EVENT] = 1
        _write(words[_NOTICE], words.ctypes.data + _EVENT * _BYTES, _BYTES)
        while _read(words[_RESUME], words.ctypes.data + _EVENT * _BYTES, _BYTES) != _BYTES:
            pass
    words[_TAKEN] = _now_ns(words) - begin_ns


ADDRESS = int(look_up.address or 0)
"""Of the compiled function."""


def ring_word(slot: int, rows: int) -> int:
    """The first word of the message that asks for `rows` rows of a slot's ids."""
    return slot | rows << 32
