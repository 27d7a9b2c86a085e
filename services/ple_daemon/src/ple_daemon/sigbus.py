"""Survives reads past the end of a truncated file, and reads of unreadable sectors, through a mapping.

The kernel answers both with SIGBUS, which would end the daemon. The handler below, compiled from LLVM IR
because no Python may run in it, counts the fault and puts a page of zeros in place of the missing one, so
that the copy in progress runs to its end. The reader compares the count before and after: when it moved,
the copied bytes are worthless and are read again with pread, which reports errors instead of signals.
Faults outside the protected ranges get the default action, as without this module.
"""

import ctypes
import mmap
import signal
import threading

import llvmlite.binding as llvm  # type: ignore[import-untyped]
import numpy as np
import numpy.typing as npt

_MAX_RANGES = 64
_SA_SIGINFO = 4

# state: [0] faults, [1] ranges in use, then first and end address of each range.
_HANDLER_IR = """
declare i64 @mmap(i64, i64, i32, i32, i32, i64)
declare i64 @signal(i32, i64)

define void @ple_on_sigbus(i32 %signal, ptr %info, ptr %context) {
entry:
  %address_field = getelementptr i8, ptr %info, i64 16
  %address = load i64, ptr %address_field
  %faults = inttoptr i64 STATE to ptr
  %count_field = getelementptr i64, ptr %faults, i64 1
  %count = load i64, ptr %count_field
  br label %next
next:
  %index = phi i64 [ 0, %entry ], [ %index_after, %advance ]
  %more = icmp slt i64 %index, %count
  br i1 %more, label %compare, label %foreign
compare:
  %twice = shl i64 %index, 1
  %first_at = add i64 %twice, 2
  %end_at = add i64 %twice, 3
  %first_field = getelementptr i64, ptr %faults, i64 %first_at
  %end_field = getelementptr i64, ptr %faults, i64 %end_at
  %first = load i64, ptr %first_field
  %end = load i64, ptr %end_field
  %above = icmp uge i64 %address, %first
  %below = icmp ult i64 %address, %end
  %inside = and i1 %above, %below
  br i1 %inside, label %patch, label %advance
advance:
  %index_after = add i64 %index, 1
  br label %next
patch:
  %before = atomicrmw add ptr %faults, i64 1 seq_cst
  %page = and i64 %address, PAGE_MASK
  %mapped = call i64 @mmap(i64 %page, i64 PAGE_BYTES, i32 1, i32 MAP_FLAGS, i32 -1, i64 0)
  %failed = icmp eq i64 %mapped, -1
  br i1 %failed, label %foreign, label %done
foreign:
  %old = call i64 @signal(i32 SIGBUS, i64 0)
  ret void
done:
  ret void
}
"""
_MAP_FIXED = 0x10


class _SigAction(ctypes.Structure):
    """struct sigaction of glibc and musl on 64-bit Linux."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ubyte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


class SigbusGuard:
    """The process's SIGBUS handler and the address ranges that it protects."""

    def __init__(self) -> None:
        self._state = np.zeros(2 + 2 * _MAX_RANGES, np.int64)
        self._lock = threading.Lock()
        self._engine, handler = _compile(self._state.ctypes.data)
        action = _SigAction(handler=handler, flags=_SA_SIGINFO)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.sigaction(int(signal.SIGBUS), ctypes.byref(action), None) != 0:
            raise OSError(ctypes.get_errno(), "sigaction(SIGBUS) failed")

    @property
    def faults(self) -> int:
        """Faults caught so far. It never goes back."""
        return int(self._state[0])

    @property
    def state(self) -> npt.NDArray[np.int64]:
        """What the handler writes: the first word is the number of faults. For kernels to read."""
        return self._state

    def protect(self, first: int, end: int) -> None:
        """Catch faults at addresses in [first, end). Raises RuntimeError beyond 64 ranges at once."""
        with self._lock:
            used = int(self._state[1])
            free = next((i for i in range(used) if self._state[2 + 2 * i] == 0), used)
            if free == _MAX_RANGES:
                raise RuntimeError(f"more than {_MAX_RANGES} protected ranges")
            self._state[2 + 2 * free : 4 + 2 * free] = (first, end)
            self._state[1] = max(used, free + 1)

    def release(self, first: int) -> None:
        """Give up the range that starts at `first`."""
        with self._lock:
            for index in range(int(self._state[1])):
                if self._state[2 + 2 * index] == first:
                    self._state[2 + 2 * index : 4 + 2 * index] = 0


def _compile(state_address: int) -> tuple[object, int]:
    """The engine that owns the machine code, and the handler's address."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    source = _HANDLER_IR
    for name, value in (
        ("STATE", state_address),
        ("PAGE_MASK", -mmap.PAGESIZE),
        ("PAGE_BYTES", mmap.PAGESIZE),
        ("MAP_FLAGS", _MAP_FIXED | mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS),
        ("SIGBUS", int(signal.SIGBUS)),
    ):
        source = source.replace(name, str(value))
    module = llvm.parse_assembly(source)
    module.verify()
    machine = llvm.Target.from_default_triple().create_target_machine()
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    return engine, engine.get_function_address("ple_on_sigbus")


_guard: SigbusGuard | None = None
_guard_lock = threading.Lock()


def guard() -> SigbusGuard:
    """The one guard of this process, installed at the first call."""
    global _guard  # noqa: PLW0603 - a signal handler belongs to the process, not to a table
    with _guard_lock:
        if _guard is None:
            _guard = SigbusGuard()
        return _guard
