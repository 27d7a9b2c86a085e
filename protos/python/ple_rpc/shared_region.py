"""Memory that a client shares with the daemon: a sealed memfd of slots, each with room for ids and rows.

    header page | slot 0: head, ids, rows | slot 1 | ...

The layout follows from three numbers, so that the header holds nothing else that could be wrong. Whoever maps
the region twice (the daemon does, and the other side is not to be trusted) copies the header once.
"""

import contextlib
import fcntl
import mmap
import os
import struct
from dataclasses import dataclass

VERSION = 1
_MAGIC = b"PLE-SHM\0"
# Magic, version, slots, rows of a slot, bytes of a row, fingerprint of the table that is meant.
_HEADER = struct.Struct("<8sIIII32s")
HEADER_BYTES = _HEADER.size

# A slot's head, written by the daemon: sequence, status (a gRPC code), the row that the status is about.
SLOT_HEAD = struct.Struct("<qqq")
_IDS_OFFSET_BYTES = 64

# Python has no names for these before 3.13 on every build.
F_ADD_SEALS, F_GET_SEALS = 1033, 1034
F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_WRITE, F_SEAL_FUTURE_WRITE = 1, 2, 4, 8, 16
SEALS = F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW


@dataclass(frozen=True, slots=True)
class RegionLayout:
    """Where things lie in a region. Offsets in bytes; slots and their rows start on pages."""

    slots: int
    max_rows: int
    row_bytes: int

    @property
    def rows_offset_bytes(self) -> int:
        """From a slot's start to its rows."""
        return _whole_pages(_IDS_OFFSET_BYTES + 8 * self.max_rows)

    @property
    def ids_offset_bytes(self) -> int:
        """From a slot's start to its ids, int64 in the machine's order."""
        return _IDS_OFFSET_BYTES

    @property
    def slot_bytes(self) -> int:
        return self.rows_offset_bytes + _whole_pages(self.max_rows * self.row_bytes)

    @property
    def size_bytes(self) -> int:
        return mmap.PAGESIZE + self.slots * self.slot_bytes

    def slot_offset_bytes(self, slot: int) -> int:
        """From the region's start to a slot's."""
        return mmap.PAGESIZE + slot * self.slot_bytes

    def header(self, fingerprint: bytes) -> bytes:
        return _HEADER.pack(_MAGIC, VERSION, self.slots, self.max_rows, self.row_bytes, fingerprint)

    @classmethod
    def parse(cls, header: bytes) -> tuple["RegionLayout", bytes]:
        """The layout and the fingerprint that a copied header asks for. Raises ValueError."""
        if len(header) < HEADER_BYTES:
            raise ValueError(f"the region's header has {len(header)} bytes of {HEADER_BYTES}")
        magic, version, slots, max_rows, row_bytes, fingerprint = _HEADER.unpack(header[:HEADER_BYTES])
        if magic != _MAGIC:
            raise ValueError("the region does not start with a header")
        if version != VERSION:
            raise ValueError(f"the region is of version {version}, this daemon speaks {VERSION}")
        return cls(slots, max_rows, row_bytes), fingerprint


class SharedRegion:
    """A region that this process made: mapped, touched, and sealed against shrinking and growing."""

    def __init__(self, layout: RegionLayout, fingerprint: bytes) -> None:
        """Raises OSError where the system has no memfd, or no memory for it."""
        self.layout = layout
        fd = os.memfd_create("ple-region", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            # Allocates every page: running out of memory is an error here and a killing signal later.
            os.posix_fallocate(fd, 0, layout.size_bytes)
            fcntl.fcntl(fd, F_ADD_SEALS, SEALS)
            self._map = mmap.mmap(
                fd, layout.size_bytes, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
            )
        except BaseException:
            os.close(fd)
            raise
        self.fd = fd
        self.buffer = memoryview(self._map)
        """The whole region, writable: what a GPU engine registers with its driver."""
        self.buffer[:HEADER_BYTES] = layout.header(fingerprint)
        # Looked up with every lookup.
        slots = range(layout.slots)
        self._ids_at = [layout.slot_offset_bytes(slot) + layout.ids_offset_bytes for slot in slots]
        self._rows_at = [layout.slot_offset_bytes(slot) + layout.rows_offset_bytes for slot in slots]

    def ids(self, slot: int, rows: int) -> memoryview:
        """Bytes of a slot's first `rows` ids, writable."""
        start = self._ids_at[slot]
        return self.buffer[start : start + 8 * rows]

    def rows(self, slot: int, rows: int) -> memoryview:
        """Bytes of a slot's first `rows` rows."""
        start = self._rows_at[slot]
        return self.buffer[start : start + self.layout.row_bytes * rows]

    def rows_offset_bytes(self, slot: int) -> int:
        """From the region's start to a slot's rows."""
        return self._rows_at[slot]

    def head(self, slot: int) -> tuple[int, int, int]:
        """What the daemon wrote last of a slot: sequence, status, detail."""
        head: tuple[int, int, int] = SLOT_HEAD.unpack_from(self.buffer, self.layout.slot_offset_bytes(slot))
        return head

    def close(self) -> None:
        """Close the descriptor and unmap; views that a caller still holds keep the mapping until they go."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        with contextlib.suppress(BufferError):
            self.buffer.release()
            self._map.close()


def _whole_pages(size_bytes: int) -> int:
    return -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
