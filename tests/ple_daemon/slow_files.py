"""A file system whose reads take as long as a test wants, or fail: a read-only folder served over /dev/fuse.

It speaks the little of FUSE that open, stat, read, O_DIRECT and mmap need. Mounting needs root.
"""

import contextlib
import ctypes
import errno
import os
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_LOOKUP, _FORGET, _GETATTR, _OPEN, _READ, _STATFS, _RELEASE, _FLUSH = 1, 2, 3, 14, 15, 17, 18, 25
_INIT, _INTERRUPT, _DESTROY, _BATCH_FORGET = 26, 36, 38, 42
_SILENT = (_FORGET, _INTERRUPT, _BATCH_FORGET)
_HEADER = struct.Struct("<IIQQIIII")
_ANSWER = struct.Struct("<IiQ")
_KEEP_CACHE = 2
_ASYNC_READ = 1
_MAX_BACKGROUND = 128
_MNT_DETACH = 2
_REQUEST_BYTES = 1 << 17

_libc = ctypes.CDLL(None, use_errno=True)


def can_mount() -> bool:
    return os.geteuid() == 0 and os.access("/dev/fuse", os.R_OK | os.W_OK)


class SlowFiles:
    """Serves the files of `source` at `mount`; `delay_s` holds for each read request from then on.

    A read request that touches a byte in `bad_bytes` fails as that of a bad sector does.
    """

    def __init__(self, source: Path, mount: Path) -> None:
        """Raises OSError where mounting is forbidden."""
        self.delay_s = 0.0
        self.bad_bytes = range(0)
        self.reads = 0
        self._paths = [path for path in sorted(source.iterdir()) if path.is_file()]
        self._files = [os.open(path, os.O_RDONLY) for path in self._paths]
        self._mount = mount
        mount.mkdir()
        self._device = os.open("/dev/fuse", os.O_RDWR)
        options = f"fd={self._device},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
        if _libc.mount(b"slow", bytes(mount), b"fuse", 1, options) != 0:
            number = ctypes.get_errno()
            os.close(self._device)
            raise OSError(number, os.strerror(number))
        self._pool = ThreadPoolExecutor(64, thread_name_prefix="slow-read")
        self._thread = threading.Thread(target=self._serve, name="slow-files")
        self._thread.start()

    def close(self) -> None:
        self.delay_s = 0.0
        _libc.umount2(bytes(self._mount), _MNT_DETACH)
        self._pool.shutdown()
        self._thread.join(20)
        os.close(self._device)
        for fd in self._files:
            os.close(fd)

    def _serve(self) -> None:
        while True:
            try:
                request = os.read(self._device, _REQUEST_BYTES + 4096)
            except OSError as error:
                if error.errno in (errno.EINTR, errno.ENOENT):
                    continue
                return  # ENODEV: unmounted
            operation = _HEADER.unpack_from(request)[1]
            if operation == _READ:
                self._pool.submit(self._answer, request)
            elif operation not in _SILENT:
                self._answer(request)

    def _answer(self, request: bytes) -> None:
        _, operation, unique, node, *_ = _HEADER.unpack_from(request)
        number, body = 0, b""
        try:
            body = self._body(operation, node, request[_HEADER.size :])
        except OSError as error:
            number = -int(error.errno or errno.EIO)
        with contextlib.suppress(OSError):  # the caller is gone, or the mount is
            os.write(self._device, _ANSWER.pack(_ANSWER.size + len(body), number, unique) + body)

    def _body(self, operation: int, node: int, arguments: bytes) -> bytes:  # noqa: PLR0911 - one for each call
        if operation == _INIT:
            major, minor, readahead = struct.unpack_from("<III", arguments)
            limits = _MAX_BACKGROUND, _MAX_BACKGROUND, 4096, 1, 32, 0, 0
            return struct.pack("<IIIIHHIIHHI28x", major, min(minor, 31), readahead, _ASYNC_READ, *limits)
        if operation == _LOOKUP:
            name = arguments.rstrip(b"\0").decode()
            for index, path in enumerate(self._paths):
                if path.name == name:
                    return struct.pack("<QQQQII", index + 2, 0, 60, 60, 0, 0) + self._attributes(index + 2)
            raise OSError(errno.ENOENT, name)
        if operation == _GETATTR:
            return struct.pack("<QII", 60, 0, 0) + self._attributes(node)
        if operation == _OPEN:
            return struct.pack("<QII", node, _KEEP_CACHE, 0)
        if operation == _READ:
            _, offset, size = struct.unpack_from("<QQI", arguments)
            return self._read(node, offset, size)
        if operation == _STATFS:
            return struct.pack("<QQQQQIIII24x", 0, 0, 0, 0, 0, 4096, 255, 4096, 0)
        if operation in (_RELEASE, _FLUSH, _DESTROY):
            return b""
        raise OSError(errno.ENOSYS, "not offered")

    def _read(self, node: int, offset: int, size: int) -> bytes:
        self.reads += 1
        time.sleep(self.delay_s)
        if max(offset, self.bad_bytes.start) < min(offset + size, self.bad_bytes.stop):
            raise OSError(errno.EIO, "bad sector")
        return os.pread(self._files[node - 2], size, offset)

    def _attributes(self, node: int) -> bytes:
        status = self._mount.parent.stat() if node == 1 else os.fstat(self._files[node - 2])
        seconds, nanos = divmod(status.st_mtime_ns, 10**9)
        mode, links = (0o040755, 2) if node == 1 else (0o100644, 1)
        return struct.pack(
            "<QQQQQQIIIIIIIIII", node, status.st_size, status.st_blocks, seconds, seconds, seconds,
            nanos, nanos, nanos, mode, links, os.geteuid(), os.getegid(), 0, 4096, 0,
        )  # fmt: skip
