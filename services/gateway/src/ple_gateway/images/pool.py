"""Worker processes for pictures: a few, replaced when they crash, hang or have done enough."""

import asyncio
import logging
import math
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import suppress

from ple_gateway.images.data_url import BadImageError
from ple_gateway.images.frames import HEADER_BYTES, pack_frame, unpack_header
from ple_gateway.settings import Settings

_LOG = logging.getLogger(__name__)
_START_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 2.0


class ImageWorkers:
    """Up to `image_workers` processes. One picture occupies one worker; others wait for it."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._free: asyncio.LifoQueue[_Worker | None] = asyncio.LifoQueue()
        for _ in range(settings.image_workers):
            self._free.put_nowait(None)  # a place whose process is started when it is first needed

    async def normalise(self, data: bytes) -> tuple[str, bytes]:
        """Return (media type, file bytes); raises BadImageError, also for a picture that kills its worker."""
        worker = await self._free.get()
        try:
            if worker is not None and worker.has_exited:
                await _end(worker)
                worker = None
            if worker is None:
                worker = await _Worker.start(self._settings)
            result = await worker.normalise(data)
        except BadImageError:
            if worker and not worker.alive:
                worker = None
            raise
        except BaseException:
            # Cancelled in the middle: what the worker says next would answer the wrong picture.
            await _end(worker)
            worker = None
            raise
        else:
            if worker.jobs >= self._settings.image_worker_jobs:
                await _end(worker)
                worker = None
            return result
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
        self.alive = True
        self.jobs = 0

    @property
    def has_exited(self) -> bool:
        """Whether the process ended by itself, say by the kernel's hand while memory was short."""
        return self._process.returncode is not None

    @classmethod
    async def start(cls, settings: Settings) -> "_Worker":
        """Start a process and wait until it is ready."""
        options = {
            "memory-bytes": settings.image_worker_memory_bytes,
            "timeout-s": math.ceil(settings.image_timeout_s) + 1,
            "max-source-px": settings.image_max_source_px,
            "max-side-px": settings.image_max_side_px,
            "max-px": settings.image_max_px,
        }
        arguments = [f"--{name}={value}" for name, value in options.items()]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "ple_gateway.images.worker", *arguments, stdin=PIPE, stdout=PIPE
        )
        worker = cls(process, settings.image_timeout_s)
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                await worker._read_answer()
        except (TimeoutError, asyncio.IncompleteReadError) as exc:
            await worker.end()
            raise RuntimeError("an image worker did not start") from exc
        except BaseException:
            await worker.end()
            raise
        return worker

    async def normalise(self, data: bytes) -> tuple[str, bytes]:
        self.jobs += 1
        try:
            async with asyncio.timeout(self._timeout_s):
                self._requests.write(pack_frame("", data))
                await self._requests.drain()
                media_type, answer = await self._read_answer()
        except TimeoutError as exc:
            await self.end()
            raise BadImageError("it takes too long to decode") from exc
        except (asyncio.IncompleteReadError, ConnectionError, RuntimeError) as exc:
            # RuntimeError is how uvloop says that a pipe is closed.
            await self.end()
            _LOG.warning("image worker crashed status=%s", self._process.returncode)
            raise BadImageError("it cannot be decoded") from exc
        if not media_type:
            raise BadImageError(answer.decode("utf-8", "replace"))
        return media_type, answer

    async def _read_answer(self) -> tuple[str, bytes]:
        type_bytes, data_bytes = unpack_header(await self._answers.readexactly(HEADER_BYTES))
        media_type = (await self._answers.readexactly(type_bytes)).decode("ascii")
        return media_type, await self._answers.readexactly(data_bytes)

    async def end(self) -> None:
        """Kill the process and wait until it is gone."""
        self.alive = False
        with suppress(ProcessLookupError):
            self._process.kill()
        self._requests.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await self._process.wait()


async def _end(worker: _Worker | None) -> None:
    if worker is not None:
        await worker.end()
