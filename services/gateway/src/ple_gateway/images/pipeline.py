"""All pictures of one request: which are kept, what the engine gets instead of each, and what fails."""

import asyncio
import hashlib
import logging
import math
import time

import pybase64

from ple_gateway.errors import invalid
from ple_gateway.images.cache import ImageCache
from ple_gateway.images.data_url import BadImageError, decode_data_url
from ple_gateway.images.decoder import ImageDecoder
from ple_gateway.images.web import WebImages
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
        self.web = WebImages(settings.image_url_max_bytes, settings.image_url_timeout_s)

    async def aclose(self) -> None:
        """End the worker processes and close connections."""
        await self._decoder.aclose()
        await self.web.aclose()

    async def prepare(self, places: list[ImagePlace]) -> list[int]:
        """Make every image part what the engine takes; returns the length of each URL that is left.

        The newest `max_images` are kept, older ones become notes. A picture that cannot be used is a 400 when
        it is the user's and new, else a note: clients send the whole history every time, and nobody can mend
        what a tool returned.
        """
        kept = places[len(places) - self._kept(places) :]
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

    def _kept(self, places: list[ImagePlace]) -> int:
        """How many of the newest are kept.

        When there are too many, more than needed go: else every further picture would change the prompt near
        its beginning, where the engine has it cached. What was never shown stays as long as it fits.
        """
        most = self._settings.max_images
        excess = max(0, len(places) - most)
        step = most - min(most, self._settings.images_kept_of_too_many) + 1
        left = len(places) - math.ceil(excess / step) * step
        return min(most, max(left, sum(place.fresh for place in places)))

    def _report(self, place: ImagePlace, fault: BadImageError) -> None:
        self._metrics.images.labels("bad").inc()
        if (place.fresh and not place.from_tool) or self._settings.image_errors == "strict":
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
        source = hashlib.sha256(place.url.encode("utf-8", "replace")).digest() if _is_web(place.url) else None
        # A web picture in history stays what it was: fetched again, it might change the prompt.
        url = self._cache.get(source) if source and not place.fresh else None
        if url is None:
            data, digest = await self._source(place.url)
            url = await self._normalised(data, digest)
            if source:
                self._cache.put(source, url)
        place.put_url(url)
        self._metrics.image_seconds.observe(time.monotonic() - began_s)

    async def _source(self, url: str) -> tuple[bytes, bytes]:
        """Return a picture's file and its digest."""
        if self._settings.image_urls == "https" and _is_web(url):
            data = await self.web.fetch(url)
            return data, await asyncio.to_thread(_digest, data)
        # In a thread: hashing 20 MB takes longer than a stream's client should wait for a token.
        return await asyncio.to_thread(_decode_and_hash, url, self._settings.max_image_bytes)

    async def _normalised(self, data: bytes, digest: bytes) -> str:
        url = self._cache.get(digest)
        self._metrics.images.labels("cached" if url else "decoded").inc()
        if url is None:
            media_type, picture = await self._decoder.normalise(data)
            url = await asyncio.to_thread(_encode, media_type, picture)
            self._cache.put(digest, url)
        return url


def _is_web(url: str) -> bool:
    return url[:40].lstrip().lower().startswith(("http:", "https:"))


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _decode_and_hash(url: str, max_bytes: int) -> tuple[bytes, bytes]:
    data = decode_data_url(url, max_bytes)
    return data, _digest(data)


def _encode(media_type: str, data: bytes) -> str:
    return f"data:{media_type};base64,{pybase64.b64encode(data).decode('ascii')}"
