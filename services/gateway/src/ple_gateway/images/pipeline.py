"""All pictures of one request: which are kept, what the engine gets instead of each, and what fails."""

import asyncio
import hashlib
import logging
import time

import pybase64

from ple_gateway.errors import invalid
from ple_gateway.images.cache import ImageCache
from ple_gateway.images.data_url import BadImageError, decode_data_url
from ple_gateway.images.decoder import ImageDecoder
from ple_gateway.messages import ImagePlace
from ple_gateway.metrics import Metrics
from ple_gateway.settings import Settings

_LOG = logging.getLogger(__name__)


class ImagePipeline:
    """Replaces image parts, in place."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self._decoder = ImageDecoder(settings)
        self._cache = ImageCache(settings.image_cache_bytes)

    async def aclose(self) -> None:
        """End the worker processes."""
        await self._decoder.aclose()

    async def prepare(self, places: list[ImagePlace]) -> list[int]:
        """Make every image part what the engine takes; returns the length of each URL that is left.

        The newest `max_images` are kept, older ones become notes. A picture that cannot be used is a 400 in
        the newest turn and a note in older ones, since clients send the whole history every time.
        """
        kept = places[max(0, len(places) - self._settings.max_images) :]
        for place in places[: len(places) - len(kept)]:
            place.put_note(f"[image left out: only the newest {self._settings.max_images} are kept]")
        results = await asyncio.gather(*(self._prepare(place) for place in kept), return_exceptions=True)
        faults = [(place, result) for place, result in zip(kept, results, strict=True) if result is not None]
        for place, fault in faults:
            if not isinstance(fault, BadImageError):
                raise fault
            self._report(place, fault)
        url_lengths = [len(place.url) for place, result in zip(kept, results, strict=True) if result is None]
        self._check_total(url_lengths)
        return url_lengths

    def _report(self, place: ImagePlace, fault: BadImageError) -> None:
        self._metrics.images.labels("bad").inc()
        if place.newest_turn or self._settings.image_errors == "strict":
            raise invalid(
                f"The image at {place.name} cannot be used: {fault}.", param=place.name, code="invalid_image"
            )
        _LOG.info("image in history left out reason=%s", str(fault)[:100])
        place.put_note("[image left out: it cannot be read]")

    def _check_total(self, url_lengths: list[int]) -> None:
        if sum(url_lengths) * 3 // 4 > self._settings.max_images_bytes:
            raise invalid(
                f"The request's images are larger than {self._settings.max_images_bytes} bytes together.",
                param="messages",
                code="invalid_image",
            )

    async def _prepare(self, place: ImagePlace) -> None:
        began_s = time.monotonic()
        # In a thread: hashing 20 MB takes longer than a stream's client should wait for a token.
        data, digest = await asyncio.to_thread(_decode_and_hash, place.url, self._settings.max_image_bytes)
        url = self._cache.get(digest)
        self._metrics.images.labels("cached" if url else "decoded").inc()
        if url is None:
            media_type, picture = await self._decoder.normalise(data)
            url = await asyncio.to_thread(_encode, media_type, picture)
            self._cache.put(digest, url)
        place.put_url(url)
        self._metrics.image_seconds.observe(time.monotonic() - began_s)


def _decode_and_hash(url: str, max_bytes: int) -> tuple[bytes, bytes]:
    data = decode_data_url(url, max_bytes)
    return data, hashlib.sha256(data).digest()


def _encode(media_type: str, data: bytes) -> str:
    return f"data:{media_type};base64,{pybase64.b64encode(data).decode('ascii')}"
