"""How long the gateway lets others wait while it works on something large, for bench/gateway_bench.py."""

import asyncio
import base64
import http.client
import io
import json
import struct
import zlib
from collections.abc import Coroutine, Iterator
from typing import Any

from gateway_engine import AT_ONCE
from gateway_load import LoadError, connected
from gateway_servers import Server
from PIL import Image

_INTERVAL_S = 0.005
_TIMEOUT_S = 60
_SIDES = (8000, 6000)
_NOISY_ROWS = 1500
_PNG_END = b"\0\0\0\0IEND\xaeB`\x82"


async def longest_wait_s(server: Server, work: Coroutine[Any, Any, Any]) -> float:
    """Seconds that the slowest answer of /livez took while `work` ran; it is asked every 5 ms."""
    longest_s = 0.0
    async with connected(server) as [probe]:
        await probe.ask("/livez")
        task = asyncio.create_task(work)
        while not task.done():
            answer = await probe.ask("/livez")
            longest_s = max(longest_s, answer.took_s())
            await asyncio.sleep(max(0.0, _INTERVAL_S - answer.took_s()))
        await task
    return longest_s


def post(server: Server, body: bytes) -> None:
    """Send a request and wait for its answer, in a thread of its own: `body` is large."""
    connection = http.client.HTTPConnection(server.host, server.port, timeout=_TIMEOUT_S)
    try:
        connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise LoadError(f"{server.url} answered {response.read()[:500]!r}")
    finally:
        connection.close()


def pictures(count: int) -> Iterator[bytes]:
    """Bodies of requests with a PNG of 48 megapixels, near the largest that is accepted; no two alike."""
    # Noise does not compress: some of it is what makes the file large.
    noise = Image.new("L", _SIDES)
    noise.paste(Image.effect_noise((_SIDES[0], _NOISY_ROWS), 3.0))
    picture = Image.merge("RGB", (noise, noise.point(lambda value: value // 2), noise))
    file = io.BytesIO()
    picture.save(file, "png", compress_level=1)
    data = file.getvalue().removesuffix(_PNG_END)
    for index in range(count):
        url = base64.b64encode(data + _text_chunk(b"number\0%d" % index) + _PNG_END).decode()
        part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{url}"}}
        messages = [{"role": "user", "content": [part]}]
        yield json.dumps({"model": AT_ONCE, "messages": messages, "max_tokens": 1}).encode()


def _text_chunk(text: bytes) -> bytes:
    return struct.pack(">I", len(text)) + b"tEXt" + text + struct.pack(">I", zlib.crc32(b"tEXt" + text))
