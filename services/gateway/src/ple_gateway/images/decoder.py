"""Pictures decoded in worker processes: any file is a picture or a reason why not."""

import math

from ple_gateway.images.data_url import BadImageError
from ple_gateway.settings import Settings
from ple_gateway.workers import WorkerCommand, WorkerCrashError, Workers, WorkerTimeoutError


class ImageDecoder:
    """Normalises pictures, a few at a time."""

    def __init__(self, settings: Settings) -> None:
        options = {
            "memory-bytes": settings.image_worker_memory_bytes,
            "timeout-s": math.ceil(settings.image_timeout_s) + 1,
            "max-source-px": settings.image_max_source_px,
            "max-side-px": settings.image_max_side_px,
            "max-px": settings.image_max_px,
        }
        self._workers = Workers(
            WorkerCommand(
                module="ple_gateway.images.worker",
                arguments=[f"--{name}={value}" for name, value in options.items()],
                count=settings.image_workers,
                jobs=settings.image_worker_jobs,
                timeout_s=settings.image_timeout_s,
            )
        )

    async def normalise(self, data: bytes) -> tuple[str, bytes]:
        """Return (media type, file bytes); raises BadImageError, also for a picture that kills its worker."""
        try:
            kind, answer = await self._workers.ask("", data)
        except WorkerTimeoutError as exc:
            raise BadImageError("it takes too long to decode") from exc
        except WorkerCrashError as exc:
            raise BadImageError("it cannot be decoded") from exc
        if kind == "error":
            raise BadImageError(answer.decode("utf-8", "replace"))
        return kind, answer

    async def aclose(self) -> None:
        """End the worker processes."""
        await self._workers.aclose()
