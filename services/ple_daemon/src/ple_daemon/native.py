"""System calls that numba kernels make themselves, so that one hot-path call never takes the GIL back.

Symbols are resolved by name at link time (not through ctypes pointers), which keeps kernels cacheable.
Every function takes and returns 64-bit integers; pointers travel as addresses.
"""

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import carray, njit, types  # type: ignore[attr-defined]
from numba.extending import intrinsic

_int64, _int32 = types.int64, types.int32

PROCESS_MADVISE = 440  # the same number on x86-64 and arm64
MADV_WILLNEED = 3
MADV_POPULATE_READ = 22
POSIX_FADV_WILLNEED = 3
SEEK_END = 2
POLLIN = 1
MSG_DONTWAIT = 0x40
MSG_NOSIGNAL = 0x4000
CLOCK_MONOTONIC = 1
RUSAGE_THREAD = 1
# Words of struct rusage, after two struct timeval and four more longs.
_RUSAGE_WORDS, _MINOR_FAULTS, _MAJOR_FAULTS = 18, 8, 9

syscall: Any = types.ExternalFunction("syscall", _int64(*[_int64] * 7))
memcpy: Any = types.ExternalFunction("memcpy", _int64(_int64, _int64, _int64))
pread: Any = types.ExternalFunction("pread", _int64(_int32, _int64, _int64, _int64))
lseek: Any = types.ExternalFunction("lseek", _int64(_int32, _int64, _int32))
madvise: Any = types.ExternalFunction("madvise", _int32(_int64, _int64, _int32))
posix_fadvise: Any = types.ExternalFunction("posix_fadvise", _int32(_int32, _int64, _int64, _int32))
poll: Any = types.ExternalFunction("poll", _int32(_int64, _int64, _int32))
recv: Any = types.ExternalFunction("recv", _int64(_int32, _int64, _int64, _int32))
send: Any = types.ExternalFunction("send", _int64(_int32, _int64, _int64, _int32))
read_fd: Any = types.ExternalFunction("read", _int64(_int32, _int64, _int64))
write_fd: Any = types.ExternalFunction("write", _int64(_int32, _int64, _int64))
usleep: Any = types.ExternalFunction("usleep", _int32(_int32))
_clock_gettime: Any = types.ExternalFunction("clock_gettime", _int32(_int32, _int64))
_getrusage: Any = types.ExternalFunction("getrusage", _int32(_int32, _int64))
_errno_location: Any = types.ExternalFunction(
    "__errno_location",
    types.CPointer(_int32)(),  # type: ignore[no-untyped-call]
)


@njit(nogil=True, cache=True)
def errno() -> int:
    """The calling thread's errno, as the last failed call left it."""
    return int(carray(_errno_location(), 1)[0])


@njit(nogil=True, cache=True)
def now_ns() -> int:
    """The monotonic clock."""
    time = np.empty(2, np.int64)
    _clock_gettime(CLOCK_MONOTONIC, time.ctypes.data)
    return int(time[0] * 1_000_000_000 + time[1])


@njit(nogil=True, cache=True)
def page_faults() -> tuple[int, int]:
    """Minor and major faults of the calling thread so far."""
    usage = np.empty(_RUSAGE_WORDS, np.int64)
    _getrusage(RUSAGE_THREAD, usage.ctypes.data)
    return usage[_MINOR_FAULTS], usage[_MAJOR_FAULTS]


def _load(_typing: Any, record: Any, field: Any) -> Any:  # noqa: ARG001 - numba passes the arguments' types
    """The int64 at word `field` of the address `record`, read at once and before whatever is read later."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(_pointer(builder, *arguments), "seq_cst", 8)

    return _int64(_int64, _int64), generate


def _store(_typing: Any, record: Any, field: Any, value: Any) -> Any:  # noqa: ARG001 - as above
    """Write an int64 as `load` reads it, after whatever was written earlier: (record, field, value)."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        record, field, value = arguments
        builder.store_atomic(value, _pointer(builder, record, field), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(_int64, _int64, _int64), generate


def _pointer(builder: Any, record: Any, field: Any) -> Any:
    word = ir.IntType(64)
    return builder.gep(builder.inttoptr(record, word.as_pointer()), [field])


load: Any = intrinsic(_load)
store: Any = intrinsic(_store)
