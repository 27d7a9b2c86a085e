"""A client of the shared-memory plane that does as it is told, however bad: for attacks on the daemon."""

import array
import fcntl
import mmap
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import numpy as np
from conftest import DEADLINE_S, Daemon

from ple_rpc import bell
from ple_rpc.shared_region import F_ADD_SEALS, SEALS, SLOT_HEAD, RegionLayout
from ple_rpc.table.v1.table_service_pb2 import AttachRequest, DescribeRequest
from ple_rpc.table.v1.table_service_pb2_grpc import TableServiceStub

POISON = 0xA5


class Peer:
    """A session with a lease, a region and a doorbell of its own. The whole region is poisoned."""

    def __init__(self, daemon: Daemon, slots: int = 4, max_rows: int = 1024, attach: bool = True) -> None:
        self.daemon = daemon
        self.channel = grpc.insecure_channel(f"unix:{daemon.socket}", [("grpc.use_local_subchannel_pool", 1)])
        self.lease = TableServiceStub(self.channel).Attach(AttachRequest(client_name="peer"))
        self.token = next(self.lease).opened.session_token
        self.described = daemon.stub.Describe(DescribeRequest(), timeout=DEADLINE_S)
        self.layout = RegionLayout(slots, max_rows, self.described.table.row_bytes)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(DEADLINE_S)
        self.socket.connect(self.described.doorbell_path)
        self.fd, self.map = -1, mmap.mmap(-1, 4096)
        self.sequence = 0
        if attach:
            self.make_region()
            status, reason = self.greet()
            assert status == 0, reason

    def make_region(self, header: bytes | None = None, size: int | None = None, seals: int = SEALS) -> None:
        size = self.layout.size_bytes if size is None else size
        self.fd = os.memfd_create("peer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, size)
        self.map = mmap.mmap(self.fd, size)
        np.frombuffer(self.map, np.uint8)[:] = POISON
        header = self.layout.header(self.described.fingerprint) if header is None else header
        self.map[: len(header)] = header
        if seals:
            fcntl.fcntl(self.fd, F_ADD_SEALS, seals)

    def greet(self, message: bytes | None = None, fds: list[int] | None = None) -> tuple[int, str]:
        fds = [self.fd] if fds is None else fds
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.socket.sendmsg([bell.greeting(self.token) if message is None else message], rights)
        return bell.parse_welcome(self.socket.recv(bell.MAX_WELCOME_BYTES))

    def put(self, slot: int, ids: object) -> int:
        """Write ids into a slot; returns how many."""
        data = np.asarray(ids, np.int64).tobytes()
        start = self.layout.slot_offset_bytes(slot) + self.layout.ids_offset_bytes
        self.map[start : start + len(data)] = data
        return len(data) // 8

    def ring(self, slot: int, rows: int, sequence: int | None = None) -> int:
        if sequence is None:
            self.sequence += 1
            sequence = self.sequence
        self.socket.send(bell.RING.pack(slot, rows, sequence))
        return sequence

    def answer(self) -> tuple[int, grpc.StatusCode, int]:
        """Slot, status, sequence of the next answer."""
        slot, status, sequence = bell.ANSWER.unpack(self.socket.recv(64))
        return slot, next(code for code in grpc.StatusCode if code.value[0] == status), sequence

    def ask(self, slot: int, ids: object) -> grpc.StatusCode:
        """A whole lookup: its status."""
        sequence = self.ring(slot, self.put(slot, ids))
        answered, status, of = self.answer()
        assert (answered, of) == (slot, sequence)
        return status

    def rows(self, slot: int, rows: int) -> np.ndarray:
        start = self.layout.slot_offset_bytes(slot) + self.layout.rows_offset_bytes
        size = rows * self.layout.row_bytes
        return np.frombuffer(self.map, np.uint8, size, start).reshape(rows, -1).copy()

    def head(self, slot: int) -> tuple[int, int, int]:
        return SLOT_HEAD.unpack_from(self.map, self.layout.slot_offset_bytes(slot))

    def is_poisoned(self, slot: int) -> bool:
        """Whether nobody wrote to the slot."""
        start = self.layout.slot_offset_bytes(slot)
        return set(self.map[start : start + self.layout.slot_bytes]) == {POISON}

    def is_cut_off(self) -> bool:
        """Whether the daemon ended the doorbell connection: waits for what it still has to say."""
        try:
            while self.socket.recv(64):
                pass
        except ConnectionError:
            pass
        return True

    def close(self) -> None:
        self.socket.close()
        self.lease.cancel()
        self.channel.close()
        if self.fd >= 0:
            os.close(self.fd)


@contextmanager
def peer(daemon: Daemon, **options: object) -> Iterator[Peer]:
    made = Peer(daemon, **options)
    try:
        yield made
    finally:
        made.close()
