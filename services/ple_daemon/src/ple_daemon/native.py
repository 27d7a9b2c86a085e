"""System calls that numba kernels make themselves, so that one hot-path call never takes the GIL back.

Symbols are resolved by name at link time (not through ctypes pointers), which keeps kernels cacheable.
Every function takes and returns 64-bit integers; pointers travel as addresses.
"""

from typing import Any

from numba import carray, njit, types  # type: ignore[attr-defined]

_int64, _int32 = types.int64, types.int32

PROCESS_MADVISE = 440  # the same number on x86-64 and arm64
MADV_WILLNEED = 3
MADV_POPULATE_READ = 22
POSIX_FADV_WILLNEED = 3
SEEK_END = 2

syscall: Any = types.ExternalFunction("syscall", _int64(*[_int64] * 7))
memcpy: Any = types.ExternalFunction("memcpy", _int64(_int64, _int64, _int64))
pread: Any = types.ExternalFunction("pread", _int64(_int32, _int64, _int64, _int64))
lseek: Any = types.ExternalFunction("lseek", _int64(_int32, _int64, _int32))
madvise: Any = types.ExternalFunction("madvise", _int32(_int64, _int64, _int32))
posix_fadvise: Any = types.ExternalFunction("posix_fadvise", _int32(_int32, _int64, _int64, _int32))
_errno_location: Any = types.ExternalFunction(
    "__errno_location",
    types.CPointer(_int32)(),  # type: ignore[no-untyped-call]
)


@njit(nogil=True, cache=True)
def errno() -> int:
    """The calling thread's errno, as the last failed call left it."""
    return int(carray(_errno_location(), 1)[0])
