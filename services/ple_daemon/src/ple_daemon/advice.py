"""Chooses how pages are advised, by trying: a container's seccomp profile can forbid process_madvise."""

import ctypes
import os

import numpy as np

from ple_daemon.errors import TableRefusedError
from ple_daemon.gather import Advice
from ple_daemon.native import MADV_WILLNEED, PROCESS_MADVISE
from ple_daemon.region import Region


class Advisor:
    """The advice in force and what it needs. `refusal` says why a better one is not used, or is empty."""

    def __init__(self, region: Region, wanted: Advice | None = None) -> None:
        """`wanted` None tries process_madvise, then posix_fadvise, then goes without.

        Raises TableRefusedError when the wanted advice does not work here.
        """
        self.pidfd = os.pidfd_open(os.getpid())
        self.refusal = ""
        for advice in [wanted] if wanted is not None else sorted(Advice, reverse=True):
            problem = _try(advice, region, self.pidfd)
            if not problem:
                self.advice = advice
                self.code = int(advice)  # what the kernels take
                return
            self.refusal = problem
        os.close(self.pidfd)
        raise TableRefusedError(f"{self.refusal}; choose another --advice")

    @property
    def name(self) -> str:
        return self.advice.name.lower()

    def close(self) -> None:
        os.close(self.pidfd)


def _try(advice: Advice, region: Region, pidfd: int) -> str:
    """Empty when the advice works on the table's first page, else what the kernel said."""
    if advice is Advice.POSIX_FADVISE:
        mapped = region.segments[0]
        try:
            os.posix_fadvise(mapped.fd, mapped.segment.offset_bytes, 1, os.POSIX_FADV_WILLNEED)
        except OSError as error:
            return f"posix_fadvise: {error.strerror}"
    if advice is Advice.PROCESS_MADVISE:
        number = _process_madvise_errno(region, pidfd)
        if number:
            return f"process_madvise: {os.strerror(number)}"
    return ""


def _process_madvise_errno(region: Region, pidfd: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    iovec = np.array([[region.first_address, 1]], np.int64)
    arguments = (PROCESS_MADVISE, pidfd, iovec.ctypes.data, 1, MADV_WILLNEED, 0)
    failed = libc.syscall(*(ctypes.c_long(value) for value in arguments)) < 0
    return ctypes.get_errno() if failed else 0
