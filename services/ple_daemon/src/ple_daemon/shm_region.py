"""A client's region as the daemon maps it: what is believed of it, and why.

The descriptor comes from another process. It must be a memfd on the kernel's own tmpfs that nobody can shrink
(a shrunk mapping would be a SIGBUS); its header is copied once and fixes the layout for good.
"""

import ctypes
import fcntl
import mmap
import os

from ple_daemon.region import map_memory, unmap_memory
from ple_rpc.errors import BadRequest, QuotaExceeded, TableChanged
from ple_rpc.shared_region import (
    F_GET_SEALS,
    F_SEAL_FUTURE_WRITE,
    F_SEAL_WRITE,
    HEADER_BYTES,
    SEALS,
    RegionLayout,
)
from ple_rpc.table.v1 import table_pb2

_MIN_SLOTS = 4
_TMPFS_MAGIC = 0x01021994
_MAP_POPULATE = getattr(mmap, "MAP_POPULATE", 0)


class MappedRegion:
    """The mapping of one checked region. `close` unmaps."""

    def __init__(self, fd: int, quotas: table_pb2.Limits, row_bytes: int, fingerprint: bytes) -> None:
        """Takes nothing over: `fd` stays the caller's to close.

        Raises BadRequest, QuotaExceeded, TableChanged, and OSError when the kernel will not map it.
        """
        _check_file(fd)
        self.layout = _checked_layout(os.pread(fd, HEADER_BYTES, 0), quotas, row_bytes, fingerprint)
        size = os.fstat(fd).st_size
        if size != self.layout.size_bytes:
            raise BadRequest(f"the region has {size} bytes, its header asks for {self.layout.size_bytes}")
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        self.address = map_memory(0, size, protection, mmap.MAP_SHARED | _MAP_POPULATE, fd, 0)

    def close(self) -> None:
        if self.address:
            unmap_memory(self.address, self.layout.size_bytes)
            self.address = 0


def _check_file(fd: int) -> None:
    try:
        seals = fcntl.fcntl(fd, F_GET_SEALS)
    except OSError as error:
        raise BadRequest("the region is not a memfd that can be sealed") from error
    if seals & SEALS != SEALS:
        raise BadRequest("the region is not sealed against shrinking, growing and further seals")
    if seals & (F_SEAL_WRITE | F_SEAL_FUTURE_WRITE):
        raise BadRequest("the region is sealed against writing")
    if _file_system(fd) != _TMPFS_MAGIC:
        raise BadRequest("the region lies on huge pages, which can run out while it is written")


def _checked_layout(
    header: bytes, quotas: table_pb2.Limits, row_bytes: int, fingerprint: bytes
) -> RegionLayout:
    try:
        layout, expected = RegionLayout.parse(header)
    except ValueError as error:
        raise BadRequest(str(error)) from error
    if expected != fingerprint:
        raise TableChanged("the region was made for another table")
    if layout.row_bytes != row_bytes:
        raise BadRequest(f"the region has rows of {layout.row_bytes} bytes, the table of {row_bytes}")
    if layout.slots < _MIN_SLOTS or layout.max_rows < 1:
        raise BadRequest(f"a region has at least {_MIN_SLOTS} slots of one row")
    if layout.slots > quotas.max_slots or layout.max_rows > quotas.max_rows_per_slot:
        raise QuotaExceeded(
            f"{layout.slots} slots of {layout.max_rows} rows, at most {quotas.max_slots} "
            f"of {quotas.max_rows_per_slot}"
        )
    if layout.size_bytes > quotas.max_region_bytes:
        raise QuotaExceeded(f"a region of {layout.size_bytes} bytes, at most {quotas.max_region_bytes}")
    return layout


def _file_system(fd: int) -> int:
    """The magic number of the file's file system."""
    status = (ctypes.c_long * 64)()  # struct statfs is smaller and starts with it
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.fstatfs(fd, status) != 0:
        raise OSError(ctypes.get_errno(), "fstatfs of a region failed")
    return int(status[0])
