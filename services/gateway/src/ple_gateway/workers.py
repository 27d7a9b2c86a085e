"""Worker processes for what clients send: a few, replaced when they crash, hang or have done enough."""

import asyncio
import logging
import os
import resource
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ple_gateway.frames import HEADER_BYTES, pack_frame, read_frame, unpack_header, write_frame

_LOG = logging.getLogger(__name__)
_START_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 2.0


class WorkerTimeoutError(Exception):
    """The work took too long."""


class WorkerCrashError(Exception):
    """The work ended its process."""


@dataclass(frozen=True)
class WorkerCommand:
    """How to start a worker, and its limits: `jobs` after which it is replaced, seconds for each."""

    module: str
    arguments: Sequence[str]
    count: int
    jobs: int
    timeout_s: float


class Workers:
    """Up to `count` processes. One job occupies one worker; others wait for it."""

    def __init__(self, command: WorkerCommand) -> None:
        self._command = command
        self._free: asyncio.LifoQueue[_Worker | None] = asyncio.LifoQueue()
        for _ in range(command.count):
            self._free.put_nowait(None)  # a place whose process is started when it is first needed

    async def ask(self, kind: str, data: bytes) -> tuple[str, bytes]:
        """Return the answer (kind, data); raises WorkerTimeoutError or WorkerCrashError."""
        worker = await self._free.get()
        try:
            if worker is not None and worker.has_exited:
                await _end(worker)
                worker = None
            if worker is None:
                worker = await _Worker.start(self._command)
            answer = await worker.ask(kind, data)
        except BaseException:
            # Also when cancelled in the middle: what the worker says next would answer the wrong question.
            await _end(worker)
            worker = None
            raise
        else:
            if worker.jobs >= self._command.jobs:
                await _end(worker)
                worker = None
            return answer
        finally:
            self._free.put_nowait(worker)

    async def aclose(self) -> None:
        """End all workers."""
        while not self._free.empty():
            await _end(self._free.get_nowait())


class _Worker:
    """One process. Its owner ends it."""

    def __init__(self, process: Process, timeout_s: float) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._requests = process.stdin
        self._answers = process.stdout
        self._timeout_s = timeout_s
        self.jobs = 0

    @property
    def has_exited(self) -> bool:
        """Whether the process ended by itself, say by the kernel's hand while memory was short."""
        return self._process.returncode is not None

    @classmethod
    async def start(cls, command: WorkerCommand) -> "_Worker":
        """Start a process and wait until it is ready."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", command.module, *command.arguments, stdin=PIPE, stdout=PIPE
        )
        worker = cls(process, command.timeout_s)
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                await worker._read_answer()
        except (TimeoutError, asyncio.IncompleteReadError) as exc:
            await worker.end()
            raise RuntimeError(f"a worker of {command.module} did not start") from exc
        except BaseException:
            await worker.end()
            raise
        return worker

    async def ask(self, kind: str, data: bytes) -> tuple[str, bytes]:
        self.jobs += 1
        try:
            async with asyncio.timeout(self._timeout_s):
                self._requests.write(pack_frame(kind, data))
                await self._requests.drain()
                return await self._read_answer()
        except TimeoutError as exc:
            raise WorkerTimeoutError from exc
        except (asyncio.IncompleteReadError, ConnectionError, RuntimeError) as exc:
            # RuntimeError is how uvloop says that a pipe is closed.
            await self.end()
            _LOG.warning("worker crashed status=%s", self._process.returncode)
            raise WorkerCrashError from exc

    async def _read_answer(self) -> tuple[str, bytes]:
        kind_bytes, data_bytes = unpack_header(await self._answers.readexactly(HEADER_BYTES))
        kind = (await self._answers.readexactly(kind_bytes)).decode("ascii")
        return kind, await self._answers.readexactly(data_bytes)

    async def end(self) -> None:
        """Kill the process and wait until it is gone."""
        with suppress(ProcessLookupError):
            self._process.kill()
        self._requests.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await self._process.wait()


async def _end(worker: _Worker | None) -> None:
    if worker is not None:
        await worker.end()


# In the worker's process.


def confine(memory_bytes: int) -> None:
    """Limit this process before it sees a byte of anyone's."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the gateway, which closes stdin


def serve_jobs(work: Callable[[str, bytes], tuple[str, bytes]], timeout_s: int) -> None:
    """Answer on stdout what comes on stdin, until that ends."""
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    write_frame(answers, "ready", b"")
    # What libraries have to say of a client's file is no line of the gateway's log.
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stderr.fileno())
    while (frame := read_frame(requests)) is not None:
        # The default action ends the process even inside a library that never returns: nobody else may be
        # left to do it.
        signal.alarm(timeout_s)
        write_frame(answers, *work(*frame))
        signal.alarm(0)
