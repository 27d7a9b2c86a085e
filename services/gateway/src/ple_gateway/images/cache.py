"""Finished pictures by the hash of what they were made from."""

from collections import OrderedDict


class ImageCache:
    """Least recently used first out, bounded in bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._urls: OrderedDict[bytes, str] = OrderedDict()
        self._held_bytes = 0

    def get(self, digest: bytes) -> str | None:
        """Return the data URL for a source's digest."""
        url = self._urls.get(digest)
        if url is not None:
            self._urls.move_to_end(digest)
        return url

    def put(self, digest: bytes, url: str) -> None:
        """Remember a data URL; one larger than the whole cache is not."""
        if len(url) > self._max_bytes:
            return
        self._held_bytes += len(url) - len(self._urls.pop(digest, ""))
        self._urls[digest] = url
        while self._held_bytes > self._max_bytes:
            _, dropped = self._urls.popitem(last=False)
            self._held_bytes -= len(dropped)
