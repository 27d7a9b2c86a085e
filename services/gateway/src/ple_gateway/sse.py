"""Server-sent events on raw bytes.

Text-line iterators split at U+2028 and U+0085 too, which stand raw inside JSON strings, and have line limits;
so events are found here, on bytes.
"""

from collections.abc import AsyncIterable, AsyncIterator, Iterator

DONE = b"[DONE]"
COMMENT = b": keep-alive\n\n"


class EventTooLargeError(Exception):
    """An event grew past the limit before it ended."""


class EventSplitter:
    """Cut a byte stream into events' data: lines end in CRLF, LF or CR, events in an empty line.

    Comments and fields other than `data` are dropped; several data lines are joined by LF.
    """

    def __init__(self, max_event_bytes: int) -> None:
        self._max_event_bytes = max_event_bytes
        self._line = bytearray()  # the unfinished last line
        self._data: list[bytes] = []
        self._data_bytes = 0
        self._after_cr = False
        self._at_start = True

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Yield the data of every event that `chunk` completes."""
        if not chunk:
            return
        ends_in_cr = chunk.endswith(b"\r")
        if self._after_cr and chunk.startswith(b"\n"):
            chunk = chunk[1:]  # the second half of a CRLF that was cut in two
        self._after_cr = ends_in_cr
        # bytes.splitlines knows exactly CR, LF and CRLF; str.splitlines knows more.
        for piece in chunk.splitlines(keepends=True):
            self._line += piece
            if len(self._line) + self._data_bytes > self._max_event_bytes:
                raise EventTooLargeError(f"an event is larger than {self._max_event_bytes} bytes")
            if piece.endswith((b"\n", b"\r")):
                line = bytes(self._line).rstrip(b"\r\n")
                self._line.clear()
                yield from self._end_line(line)

    def _end_line(self, line: bytes) -> Iterator[bytes]:
        if self._at_start:
            line = line.removeprefix(b"\xef\xbb\xbf")
            self._at_start = False
        if not line:
            if self._data:
                yield b"\n".join(self._data)
            self._data = []
            self._data_bytes = 0
            return
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
            self._data_bytes += len(value) + 1


async def split_events(chunks: AsyncIterable[bytes], max_event_bytes: int) -> AsyncIterator[bytes]:
    """Yield each event's data as soon as it is complete; what is unfinished at the end is dropped."""
    splitter = EventSplitter(max_event_bytes)
    async for chunk in chunks:
        for data in splitter.feed(chunk):
            yield data


def frame(data: bytes) -> bytes:
    """One event whose data is a one-line JSON text.

    Line separators that only some clients take for line ends are escaped: in JSON they can stand nowhere but
    inside a string.
    """
    if b"\xe2\x80" in data:
        data = data.replace(b"\xe2\x80\xa8", rb"\u2028").replace(b"\xe2\x80\xa9", rb"\u2029")
    if b"\xc2\x85" in data:
        data = data.replace(b"\xc2\x85", rb"\u0085")
    return b"data: " + data + b"\n\n"


def named(event: str, data: bytes) -> bytes:
    """One event with a name, and data as in `frame`."""
    return b"event: " + event.encode() + b"\n" + frame(data)
