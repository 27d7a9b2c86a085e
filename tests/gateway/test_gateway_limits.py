"""Bombs: every one is a clear 4xx, soon, and costs the gateway and its workers bounded memory."""

import base64
import io
import json
import struct
import time
import zlib

import pytest
from gateway_process import GatewayProcess, chat_body
from PIL import Image

GATEWAY_MIB = 600
WORKER_MIB = 1100
SOON_S = 15.0


@pytest.fixture(scope="module")
def process(tmp_path_factory):
    gateway = GatewayProcess(tmp_path_factory.mktemp("limits"), image_workers=1)
    yield gateway
    gateway.stop()


def refused(process, body, path="/v1/chat/completions"):
    """Send; the error object of the 4xx that must come back, within time and memory."""
    process.begin_measuring()
    began_s = time.monotonic()
    status, answer = process.send("POST", path, body)
    assert time.monotonic() - began_s < SOON_S
    peak = process.peak_mib()
    assert peak["gateway"] < GATEWAY_MIB, peak
    assert peak["worker"] < WORKER_MIB, peak
    assert 400 <= status < 500, (status, answer[:300])
    error = json.loads(answer)["error"]
    assert error["message"]
    assert process.send("POST", "/v1/chat/completions", chat_body())[0] == 200  # and the next one works
    return {**error, "status": status}


MIB = 2**20
HEAD = b'{"messages": [{"role": "user", "content": "hi"}], "x": '


def filled(unit, mebibytes=63):
    return HEAD + b"[" + unit * (mebibytes * MIB // len(unit)) + b"0]}"


BODIES = {
    "objects": (filled(b"{},"), "values"),
    "lists": (filled(b"[],"), "values"),
    "numbers": (filled(b"0,"), "values"),
    "strings": (filled(b'"",'), "values"),
    "nests": (filled(b"[" * 200 + b"]" * 200 + b","), "values"),
    "members": (filled(b'{"a":1},'), "values"),
    "depth": (HEAD + b"[" * (60 * MIB), "values"),
    "keys": (HEAD + b'{"a":' * (10 * MIB), "values"),
    "bytes": (b"\xff" * (60 * MIB), "JSON"),
    "blanks": (b" " * (60 * MIB), "JSON"),
    "digits": (HEAD + b"9" * (60 * MIB) + b"}", "JSON"),
    "half a surrogate": (HEAD + b'"\\ud800' * (8 * MIB), "JSON"),
}


@pytest.mark.parametrize("name", BODIES)
def test_64_mib_bodies(process, name):
    body, word = BODIES[name]
    assert word in refused(process, body)["message"]


def test_larger_bodies_are_413(process):
    assert refused(process, HEAD + b'"' + b"x" * (64 * MIB) + b'"}')["status"] == 413


def test_64_mib_of_text_goes_to_the_engine(process):
    """Whether a prompt is too long is the engine's to say; the gateway passes it on in bounded memory."""
    process.begin_measuring()
    text = "hello world " * (60 * MIB // 12)
    assert (
        process.send("POST", "/v1/chat/completions", chat_body(messages=[{"role": "user", "content": text}]))[
            0
        ]
        == 200
    )
    assert process.peak_mib()["gateway"] < GATEWAY_MIB


def test_100k_messages_and_parts(process):
    messages = [{"role": "user", "content": "x"}] * 100_000
    assert "messages" in refused(process, chat_body(messages=messages))["message"]
    parts = [{"role": "user", "content": [{"type": "text", "text": "x"}] * 100_000}]
    assert "parts" in refused(process, chat_body(messages=parts))["message"]
    tools = [{"type": "function", "function": {"name": f"f{n}"}} for n in range(100_000)]
    assert "tools" in refused(process, chat_body(tools=tools))["message"]
    assert (
        "logit_bias" in refused(process, chat_body(logit_bias={str(n): 1 for n in range(200_000)}))["message"]
    )


def nested(levels, kind):
    value = 0
    for _ in range(levels):
        value = [value] if kind == "list" else {"a": value}
    return value


@pytest.mark.parametrize("kind", ["list", "object"])
def test_deep_json(process, kind):
    assert process.send("POST", "/v1/chat/completions", chat_body(metadata=nested(50, kind)))[0] == 200
    assert "deep" in refused(process, chat_body(metadata=nested(300, kind)))["message"]
    assert refused(process, chat_body(messages=nested(50, kind)))["status"] == 400
    assert refused(process, chat_body(response_format=nested(50, kind)))["status"] == 400
    assert refused(process, chat_body(tools=nested(50, kind)))["status"] == 400


def saved(image, kind, **options):
    output = io.BytesIO()
    image.save(output, kind, **options)
    return output.getvalue()


def png_chunk(name, data):
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png_with(*chunks, size=(64, 64)):
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", *size, 8, 2, 0, 0, 0))
    pixels = png_chunk(
        b"IDAT", zlib.compress(b"\0" * (size[1] * (size[0] * 3 + 1)) if size[0] < 100 else b"")
    )
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + pixels + png_chunk(b"IEND", b"")


def large(mode, size, kind, **options):
    return saved(Image.new(mode, size), kind, **options)


BLOWN_UP = zlib.compress(b"\0" * (200 * MIB), 9)
GIF_HEADER = b"GIF89a" + struct.pack("<HHBBB", 65535, 65535, 0, 0, 0)
TIFF_TAGS = [
    (256, 100_000),
    (257, 100_000),
    (258, 8),
    (259, 1),
    (262, 1),
    (273, 8),
    (277, 1),
    (278, 100_000),
    (279, 9),
]
TIFF_HUGE = (
    b"II*\0\x08\0\0\0"
    + struct.pack("<H", 9)
    + b"".join(struct.pack("<HHII", t, 4, 1, v) for t, v in TIFF_TAGS)
)
BOMBS = {
    "png of 81 megapixels in 10 kB": lambda: large("1", (9_000, 9_000), "PNG"),
    "png with a huge header": lambda: png_with(size=(2**31 - 1, 2**31 - 1)),
    "png 1 x 31,000": lambda: large("RGB", (1, 31_000), "PNG"),
    "jpeg 31,000 x 1": lambda: large("RGB", (31_000, 1), "JPEG"),
    "jpeg of 81 megapixels": lambda: large("L", (9_000, 9_000), "JPEG"),
    "gif with a huge header": lambda: GIF_HEADER + struct.pack("<BHHHHBB", 44, 0, 0, 65535, 65535, 0, 8),
    "bmp with a huge header": lambda: b"BM" + struct.pack("<IIIIiiHH24x", 54, 0, 54, 40, 9_000, 9_000, 1, 24),
    "tiff with a huge header": lambda: TIFF_HUGE + b"\0" * 16,
    "tiff of 100 megapixels in little": lambda: large("1", (10_000, 10_000), "TIFF", compression="group4"),
    "webp with a huge header": lambda: b"RIFF\x1a\0\0\0WEBPVP8L\x0d\0\0\0/" + b"\xff" * 4 + b"\0" * 9,
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_g10_picture_bombs(process, name):
    url = "data:;base64," + base64.b64encode(BOMBS[name]()).decode()
    part = {"type": "image_url", "image_url": {"url": url}}
    error = refused(process, chat_body(messages=[{"role": "user", "content": [part]}]))
    assert (error["status"], error["code"]) == (400, "invalid_image")
    assert error["param"] == "messages[0].content[0]"


@pytest.mark.parametrize("chunk", [b"zTXt", b"iCCP", b"iTXt"])
def test_g10_chunks_that_blow_up_cost_little(process, chunk):
    """200 MiB of nothing in a text or profile: the picture is used without it, or refused."""
    head = b"name\0\1\0\0\0" if chunk == b"iTXt" else b"name\0\0"
    data = png_with(*[png_chunk(chunk, head + BLOWN_UP)] * 3)
    part = {"type": "image_url", "image_url": {"url": "data:;base64," + base64.b64encode(data).decode()}}
    process.begin_measuring()
    body = chat_body(messages=[{"role": "user", "content": [part]}])
    assert process.send("POST", "/v1/chat/completions", body)[0] in {200, 400}
    assert process.peak_mib()["worker"] < WORKER_MIB
    assert process.peak_mib()["gateway"] < GATEWAY_MIB
