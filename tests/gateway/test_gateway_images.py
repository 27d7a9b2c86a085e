"""Pictures: every kind comes out as the pixels a person sees, every bad one is a 400 that names its part."""

import asyncio
import base64
import io
import os
import random
import signal
import threading
import time
from pathlib import Path

import pillow_heif
import psutil
import pytest
from fake_engine import wait_for
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageCms

from ple_gateway.images.cache import ImageCache
from ple_gateway.images.data_url import BadImageError, decode_data_url
from ple_gateway.images.normalise import NormaliseLimits, normalise

pillow_heif.register_heif_opener()
Image.init()
LIMITS = NormaliseLimits(max_source_px=64_000_000, max_side_px=30_000, max_px=2_097_152)


def saved(image, kind, **options):
    output = io.BytesIO()
    image.save(output, kind, **options)
    return output.getvalue()


def solid(mode, colour, size=(64, 64)):
    return Image.new(mode, size, colour)


def photo(size, seed=1):
    """Smooth and with many colours, as photographs are."""
    small = Image.frombytes("RGB", (16, 16), random.Random(seed).randbytes(768))
    return small.resize(size, Image.Resampling.BICUBIC)


def url(data, kind="image/png"):
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def part(data):
    return {"type": "image_url", "image_url": {"url": data if isinstance(data, str) else url(data)}}


def user(*parts):
    return {"role": "user", "content": list(parts)}


def reopened(data):
    return Image.open(io.BytesIO(data))


def sent_images(call):
    """The data URLs that the engine got, decoded."""
    contents = [
        message["content"] for message in call.request["messages"] if isinstance(message["content"], list)
    ]
    urls = [
        entry["image_url"]["url"] for content in contents for entry in content if entry["type"] == "image_url"
    ]
    return [base64.b64decode(found.partition(",")[2]) for found in urls]


RED = (255, 0, 0)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (saved(solid("RGB", RED), "PNG"), RED),
        (saved(solid("RGB", RED), "JPEG"), RED),
        (saved(solid("RGB", RED), "WEBP", lossless=True), RED),
        (saved(solid("RGB", RED), "GIF"), RED),
        (saved(solid("RGB", RED), "BMP"), RED),
        (saved(solid("RGB", RED), "TIFF"), RED),
        (saved(solid("RGB", RED), "AVIF"), RED),
        (saved(solid("RGB", RED), "HEIF"), RED),
        (saved(solid("P", 0), "PNG"), (0, 0, 0)),
        (saved(solid("1", 1), "PNG"), (255, 255, 255)),
        (saved(solid("L", 100), "PNG"), (100, 100, 100)),
        (saved(solid("I;16", 40000), "PNG"), (156, 156, 156)),
        (saved(solid("I;16", 40000), "TIFF"), (156, 156, 156)),
        (saved(solid("I", 30000), "TIFF"), (117, 117, 117)),
        (saved(solid("F", 0.5), "TIFF"), (128, 128, 128)),
        (saved(solid("CMYK", (0, 200, 200, 0)), "JPEG"), (255, 55, 55)),
        (saved(solid("RGBA", (255, 0, 0, 128)), "PNG"), (255, 127, 127)),
        (saved(solid("RGBA", (255, 0, 0, 0)), "WEBP", lossless=True), (255, 255, 255)),
        (saved(solid("LA", (0, 0)), "PNG"), (255, 255, 255)),
        (saved(solid("RGB", RED), "PNG", transparency=RED), (255, 255, 255)),
        (saved(solid("RGB", RED), "PNG", save_all=True, append_images=[solid("RGB", (0, 0, 255))]), RED),
        (saved(solid("RGB", RED), "GIF", save_all=True, append_images=[solid("RGB", (0, 0, 255))]), RED),
    ],
)
def test_g04_g06_g07_g08_g11_colours(data, expected):
    media_type, made = normalise(data, LIMITS)
    image = reopened(made)
    assert image.mode == "RGB"
    assert media_type == f"image/{image.format.lower()}"
    assert all(abs(a - b) <= 2 for a, b in zip(image.getpixel((32, 32)), expected, strict=True))


@pytest.mark.parametrize("orientation", [1, 2, 3, 4, 5, 6, 7, 8, 99])
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_g01_g02_g03_orientation(orientation, kind):
    """A red corner ends where EXIF says; `steps` undo what a camera did."""
    image = solid("RGB", (255, 255, 255), (128, 64))
    image.paste(RED, (0, 0, 32, 32))
    exif = Image.Exif()
    exif[0x0112] = orientation
    _, made = normalise(
        saved(image, kind, exif=exif, **({"lossless": True} if kind == "WEBP" else {})), LIMITS
    )
    result = reopened(made)
    assert result.size == ((64, 128) if orientation in (5, 6, 7, 8) else (128, 64))
    width, height = result.size
    right = orientation in (2, 3, 6, 7)
    bottom = orientation in (3, 4, 7, 8)
    corner = result.getpixel((width - 16 if right else 16, height - 16 if bottom else 16))
    assert corner[0] > 240
    assert corner[1] < 20
    assert not result.getexif()


def test_colour_profile_is_applied():
    lab = ImageCms.createProfile("LAB")
    broken = saved(solid("RGB", RED), "PNG", icc_profile=b"not a profile")
    assert reopened(normalise(broken, LIMITS)[1]).getpixel((5, 5)) == RED
    wrong_space = saved(solid("RGB", RED), "PNG", icc_profile=ImageCms.ImageCmsProfile(lab).tobytes())
    assert reopened(normalise(wrong_space, LIMITS)[1]).getpixel((5, 5)) == RED
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    made = normalise(saved(solid("RGB", (200, 30, 40)), "PNG", icc_profile=srgb), LIMITS)[1]
    assert all(abs(a - b) <= 2 for a, b in zip(reopened(made).getpixel((5, 5)), (200, 30, 40), strict=True))
    assert "icc_profile" not in reopened(made).info


@pytest.mark.parametrize("data", [saved(photo((64, 64)), "PNG"), saved(photo((640, 480)), "JPEG")])
def test_unchanged_pictures_pass_as_they_came(data):
    assert normalise(data, LIMITS)[1] is data


@pytest.mark.parametrize("size", [(2400, 1800), (1920, 1093), (900, 2700)])
def test_large_pictures_shrink_to_multiples_of_32(size):
    for kind in ("JPEG", "PNG"):
        data = saved(photo(size), kind, **({"compress_level": 1} if kind == "PNG" else {}))
        made = reopened(normalise(data, LIMITS)[1])
        assert made.width % 32 == made.height % 32 == 0
        assert LIMITS.max_px * 0.9 < made.width * made.height <= LIMITS.max_px
        assert made.width / made.height == pytest.approx(size[0] / size[1], rel=0.05)
        assert made.format == "JPEG"


@pytest.mark.parametrize("size", [(1, 20_000), (29_000, 3), (1, 1), (31, 40), (12_000, 200)])
def test_extreme_shapes_get_a_border(size):
    made = reopened(normalise(saved(solid("RGB", RED, size), "PNG"), LIMITS)[1])
    assert min(made.size) >= 32
    assert max(made.size) / min(made.size) < 150
    assert made.width * made.height <= LIMITS.max_px


def test_same_input_gives_the_same_bytes():
    data = saved(photo((2000, 1500)), "WEBP")
    assert normalise(data, LIMITS) == normalise(data, LIMITS)


@settings(max_examples=80)
@given(st.sampled_from(["JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF"]), st.data())
def test_damaged_files_are_pictures_or_bad_images(kind, data):
    whole = bytearray(saved(photo((80, 50)), kind))
    for _ in range(data.draw(st.integers(1, 6))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    try:
        made = normalise(bytes(whole[: data.draw(st.integers(0, len(whole)))]), LIMITS)[1]
    except BadImageError:
        return
    assert reopened(made).mode == "RGB"


@pytest.mark.parametrize(
    "written",
    [
        "data:image/png;base64,{}",
        "DATA:image/png;BASE64,{}",
        "data:;base64,{}",
        "data:image/png;x=y;Base64 ,{}",
        "data:image/png;base64;charset=utf-8,{}",
        "data:image/png;base64,\n {} \r\n",
    ],
)
def test_g13_data_urls_as_clients_write_them(written):
    data = bytes(range(256)) + b"x"
    plain = base64.b64encode(data).decode()
    for text in (
        plain,
        plain.rstrip("="),
        base64.urlsafe_b64encode(data).decode(),
        plain.replace("+", "%2B"),
    ):
        assert decode_data_url(written.format(text), 1000) == data
    assert decode_data_url("data:text/plain,a%20b", 1000) == b"a b"


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ("http://example.org/a.png", "not fetched"),
        ("HTTPS://example.org/a.png", "not fetched"),
        ("file:///etc/passwd", "data URLs"),
        ("ftp://x", "data URLs"),
        ("nonsense", "data URLs"),
        ("data:image/png", "comma"),
        ("data:image/png;base64,", "empty"),
        ("data:image/png;base64,ab!c", "index 2"),
        ("data:;base64,aéa", "index 1"),
        ("data:;base64,abcde", "cut off"),
        ("data:;base64," + "A" * 2000, "larger"),
        ("data:," + "A" * 2000, "larger"),
    ],
)
def test_g13_bad_data_urls_say_why(written, reason):
    with pytest.raises(BadImageError, match=reason):
        decode_data_url(written, 1000)


def test_cache_is_bounded_and_forgets_the_oldest():
    cache = ImageCache(30)
    for name in (b"a", b"b", b"c"):
        cache.put(name, "x" * 10)
    assert cache.get(b"a")
    cache.put(b"d", "x" * 10)
    assert cache.get(b"b") is None
    assert cache.get(b"a")
    cache.put(b"e", "x" * 31)
    assert cache.get(b"e") is None


def test_image_chat_with_every_spelling(gateway, engine):
    data = saved(photo((2400, 1800)), "PNG", compress_level=1)
    small = url(saved(solid("RGB", RED), "PNG"))
    answered = gateway.chat(
        messages=[
            user(
                part(data),
                {"type": "image_url", "image_url": small},
                {"type": "input_image", "image_url": small},
                {
                    "type": "image",
                    "source": {"type": "base64", "media_type": "image/png", "data": small.partition(",")[2]},
                },
                {"type": "text", "text": "what?"},
            )
        ]
    )
    assert answered.status == 200, answered.body
    first, *rest = sent_images(engine.calls[-1])
    assert reopened(first).size == (1664, 1248)
    assert rest == [saved(solid("RGB", RED), "PNG")] * 3
    content = engine.calls[-1].request["messages"][0]["content"]
    assert set(content[0]["image_url"]) == {"url"}
    gateway.chat(messages=[user(part(data))])
    assert sent_images(engine.calls[-1]) == [first]
    assert gateway.metric("images_total", outcome="cached") >= 1


BAD = part("data:image/png;base64,AAAA")


def test_g09_bad_image_in_the_newest_turn_names_its_part(gateway, engine):
    history = [user({"type": "text", "text": "x"}), {"role": "assistant", "content": "y"}]
    answered = gateway.chat(messages=[*history, user({"type": "text", "text": "z"}, BAD)])
    assert (answered.status, answered.error["code"]) == (400, "invalid_image")
    assert answered.error["param"] == "messages[2].content[1]"
    web = gateway.chat(messages=[user(part("http://example.org/secret.png"))])
    assert web.status == 400
    assert "data URL" in web.error["message"]
    assert "example.org" not in web.error["message"]
    assert not engine.calls


def test_g09_bad_image_in_history_becomes_a_note(gateway, start_gateway, engine):
    messages = [user(BAD), {"role": "assistant", "content": "y"}, {"role": "user", "content": "z"}]
    assert gateway.chat(messages=messages).status == 200
    assert "left out" in engine.calls[-1].request["messages"][0]["content"][0]["text"]
    assert start_gateway(image_errors="strict").chat(messages=messages).status == 400


def answered_turns(count):
    """A conversation of `count` pictures, each answered but the last."""
    turns = [user(part(saved(solid("RGB", (index, 0, 0)), "PNG"))) for index in range(count)]
    return [message for turn in turns for message in (turn, {"role": "assistant", "content": "ok"})][:-1]


def test_g15_too_many_images_drop_to_two_and_grow_again(gateway, engine):
    kept = []
    for count in range(1, 12):
        assert gateway.chat(messages=answered_turns(count)).status == 200
        kept.append(len(sent_images(engine.calls[-1])))
        newest = [saved(solid("RGB", (index, 0, 0)), "PNG") for index in range(count)]
        assert sent_images(engine.calls[-1]) == newest[-kept[-1] :]
    assert kept == [1, 2, 3, 4, 2, 3, 4, 2, 3, 4, 2]
    # While the number grows, what was sent before stays as it was: the engine's cache holds.
    told = [call.request["messages"] for call in engine.calls[4:7]]
    assert told[1][: len(told[0])] == told[0]
    assert told[2][: len(told[1])] == told[1]
    assert "left out" in told[0][0]["content"][0]["text"]


def test_g15_new_images_are_kept_while_they_fit(gateway, engine):
    pictures = [saved(solid("RGB", (index, 0, 0)), "PNG") for index in range(6)]
    assert gateway.chat(messages=[user(*map(part, pictures))]).status == 200
    assert sent_images(engine.calls[-1]) == pictures[2:]
    assert gateway.chat(messages=[*answered_turns(4), user(*map(part, pictures[:3]))]).status == 200
    assert len(sent_images(engine.calls[-1])) == 4


def tool_turn(content):
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    return [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": content},
    ]


SVG = url(b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"/>', "image/svg+xml")


def test_g09_svg_is_a_400_from_the_user_and_a_note_from_a_tool(gateway, engine):
    answered = gateway.chat(messages=[user(part(SVG))])
    assert (answered.status, answered.error["code"]) == (400, "invalid_image")
    assert "SVG" in answered.error["message"]
    assert not engine.calls
    # Nobody can mend what a tool returned: a 400 would come back at every step of the loop.
    assert gateway.chat(messages=tool_turn([part(SVG)])).status == 200
    assert "left out" in engine.calls[-1].request["messages"][-1]["content"][0]["text"]
    # A picture that an answer was given to is history, also within one user turn.
    steps = [user(part(SVG)), *tool_turn("done")[1:]]
    assert gateway.chat(messages=steps).status == 200
    # An answer at the very end is being written: the picture before it is new.
    assert gateway.chat(messages=[user(part(SVG)), {"role": "assistant", "content": "I"}]).status == 400


def test_g07_heic_under_any_name(gateway, engine):
    heic = saved(photo((96, 64)), "HEIF")
    for kind in ("image/png", "", "application/octet-stream", "image/heic"):
        assert gateway.chat(messages=[user(part(url(heic, kind)))]).status == 200
        (sent,) = sent_images(engine.calls[-1])
        assert reopened(sent).format == "JPEG"
        assert reopened(sent).size == (96, 64)
    assert len({call.body for call in engine.calls}) == 1


def adobe_marker(jpeg):
    begin = jpeg.index(b"\xff\xee")
    return begin, begin + 2 + int.from_bytes(jpeg[begin + 2 : begin + 4], "big")


def test_g05_cmyk_and_ycck_with_and_without_adobe_marker():
    jpeg = saved(solid("CMYK", (0, 200, 200, 0)), "JPEG", quality=100)
    begin, end = adobe_marker(jpeg)
    for data in (jpeg, jpeg[:begin] + jpeg[end:]):
        assert reopened(normalise(data, LIMITS)[1]).getpixel((9, 9)) == pytest.approx((255, 55, 55), abs=3)
    # Stored without chroma: marked as YCCK it is grey, where as CMYK it would be blue.
    ycck = bytearray(saved(solid("CMYK", (200, 127, 127, 0)), "JPEG", quality=100))
    ycck[adobe_marker(bytes(ycck))[1] - 1] = 2
    assert reopened(normalise(bytes(ycck), LIMITS)[1]).getpixel((9, 9)) == pytest.approx(
        (200, 200, 200), abs=3
    )


def test_g05_an_embedded_profile_is_used():
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    swapped = srgb.replace(b"rXYZ", b"tmp!").replace(b"bXYZ", b"rXYZ").replace(b"tmp!", b"bXYZ")
    for kind, options in (
        ("PNG", {}),
        ("JPEG", {"quality": 100, "subsampling": 0}),
        ("WEBP", {"lossless": True}),
    ):
        made = normalise(saved(solid("RGB", RED), kind, icc_profile=swapped, **options), LIMITS)[1]
        assert reopened(made).getpixel((5, 5)) == pytest.approx((0, 0, 255), abs=4)


@pytest.mark.parametrize("value", [0, 1000, 32768, 65535])
def test_g11_sixteen_bits_in_every_byte_order(value):
    expected = (round(value / 257),) * 3
    for mode, kind in (("I;16", "PNG"), ("I;16", "TIFF"), ("I;16B", "TIFF"), ("I", "TIFF")):
        made = reopened(normalise(saved(solid(mode, value), kind), LIMITS)[1])
        assert made.getpixel((5, 5)) == pytest.approx(expected, abs=1)


def peak_bytes(pid):
    """The most memory that a process has held; pages that others share count too."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_g12_25_megapixels_in_bounded_time_and_memory(start_gateway, engine, kind):
    gateway = start_gateway()
    before = set(worker_pids())
    options = {"PNG": {"compress_level": 1}, "WEBP": {"method": 0}}.get(kind, {})
    image = photo((5000, 5000)) if kind == "JPEG" else Image.new("RGB", (5000, 5000), (200, 100, 50))
    began_s = time.monotonic()
    assert gateway.chat(messages=[user(part(saved(image, kind, **options)))]).status == 200
    assert time.monotonic() - began_s < 10
    (sent,) = sent_images(engine.calls[-1])
    assert reopened(sent).size == (1440, 1440)
    (pid,) = set(worker_pids()) - before
    assert peak_bytes(pid) < 512 * 2**20  # a plain copy of the picture takes 75 MB


SMALL = saved(solid("RGB", RED), "PNG")
BASE64 = base64.b64encode(SMALL).decode()
SPELLINGS = [
    {"type": "image_url", "image_url": {"url": url(SMALL), "detail": "high"}},
    {"type": "image_url", "image_url": url(SMALL)},
    {"type": "image_url", "url": url(SMALL)},
    {"type": "input_image", "image_url": url(SMALL), "detail": "auto"},
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": BASE64}},
    {"type": "image", "source": {"type": "url", "url": url(SMALL)}},
    {"type": "image", "data": BASE64, "mimeType": "image/png"},
    {"type": "image", "image": BASE64, "mediaType": "image/png"},
    {"type": "image", "image": url(SMALL)},
    {"type": "image", "base64": BASE64, "mime_type": "image/png"},
    {"type": "image", "source_type": "base64", "mime_type": "image/png", "data": BASE64},
    {"type": "file", "mediaType": "image/png", "data": BASE64},
    {"type": "file", "mediaType": "image/png", "url": url(SMALL)},
    {"type": "file", "file": {"filename": "a.png", "file_data": url(SMALL)}},
    {"type": "media", "mime_type": "image/png", "data": BASE64},
    {"inline_data": {"mime_type": "image/png", "data": BASE64}},
    {"inlineData": {"mimeType": "image/png", "data": BASE64}},
    {"image": {"format": "png", "source": {"bytes": BASE64}}},
    {"image_url": {"url": url(SMALL)}},
    {"image": url(SMALL)},
]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings_of_picture_parts(gateway, engine, spelling):
    assert gateway.chat(messages=[user(spelling)]).status == 200
    assert sent_images(engine.calls[-1]) == [SMALL]


@pytest.mark.parametrize(
    "bad",
    [
        {"type": "input_image", "file_id": "file-1"},
        {"type": "image"},
        {"type": "image_url", "image_url": {}},
        {"type": "image_url", "image_url": {"url": 7}},
        {"type": "image", "source": {"source": {"source": {"source": {"source": url(SMALL)}}}}},
        {"type": "file", "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,AAAA"}},
        {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"type": "image_url", "image_url": "C:\\a.png"},
    ],
)
def test_other_parts_are_named_in_a_400(gateway, engine, bad):
    answered = gateway.chat(messages=[user({"type": "text", "text": "x"}, bad)])
    assert answered.status == 400
    assert answered.error["param"].startswith("messages[0].content[1]")
    assert not engine.calls


def test_g10_bombs_and_big_files_are_refused(start_gateway):
    gateway = start_gateway(max_image_bytes=100_000, max_images_bytes=150_000)
    bomb = saved(Image.new("1", (13_000, 13_000)), "PNG")
    assert len(bomb) < 30_000
    answered = gateway.chat(messages=[user(part(bomb))])
    assert answered.status == 400
    assert "pixels" in answered.error["message"]
    assert gateway.chat(messages=[user(part(random.Random(1).randbytes(120_000)))]).status == 400
    noise = [
        saved(Image.frombytes("RGB", (160, 160), random.Random(n).randbytes(76_800)), "PNG") for n in range(3)
    ]
    assert gateway.chat(messages=[user(*map(part, noise))]).error["code"] == "invalid_image"


def worker_pids():
    children = psutil.Process().children()
    return [child.pid for child in children if "ple_gateway.images.worker" in " ".join(child.cmdline())]


def test_a_killed_or_hanging_worker_costs_one_request(start_gateway, engine):
    gateway = start_gateway(image_timeout_s=1)
    before = set(worker_pids())
    assert gateway.chat(messages=[user(part(saved(solid("RGB", RED), "GIF")))]).status == 200
    (pid,) = set(worker_pids()) - before
    os.kill(pid, signal.SIGSTOP)
    answered = gateway.chat(messages=[user(part(saved(solid("RGB", (1, 2, 3)), "GIF")))])
    assert (answered.status, answered.error["code"]) == (400, "invalid_image")
    assert gateway.chat(messages=[user(part(saved(solid("RGB", (4, 5, 6)), "GIF")))]).status == 200
    (pid,) = set(worker_pids()) - before
    os.kill(pid, signal.SIGKILL)
    assert gateway.chat(messages=[user(part(saved(solid("RGB", (7, 8, 9)), "GIF")))]).status in {200, 400}
    assert gateway.chat(messages=[user(part(saved(solid("RGB", (1, 1, 1)), "GIF")))]).status == 200
    gateway.stop()
    wait_for(lambda: set(worker_pids()) <= before, "no worker is left")


def test_workers_are_replaced_and_their_memory_is_limited(start_gateway):
    gateway = start_gateway(image_worker_jobs=1, image_worker_memory_bytes=300 * 2**20)
    before = set(worker_pids())
    for colour in (10, 20):
        assert gateway.chat(messages=[user(part(saved(solid("RGB", (colour, 0, 0)), "GIF")))]).status == 200
        wait_for(lambda: set(worker_pids()) <= before, "the worker has done its one job")
    large = gateway.chat(
        messages=[user(part(saved(Image.new("RGBA", (8000, 8000)), "PNG", compress_level=1)))]
    )
    assert large.status == 400


def test_event_loop_goes_on_while_48_megapixels_decode(gateway, engine):
    data = saved(Image.new("RGB", (8000, 6000), (9, 8, 7)), "PNG", compress_level=1)
    stalls = []

    async def watch(done):
        loop = asyncio.get_running_loop()
        while not done.is_set():
            before = loop.time()
            await asyncio.sleep(0.005)
            stalls.append(loop.time() - before - 0.005)

    done = threading.Event()
    watching = asyncio.run_coroutine_threadsafe(watch(done), gateway.loop)
    began = time.monotonic()
    assert gateway.chat(messages=[user(part(data))]).status == 200
    took = time.monotonic() - began
    done.set()
    watching.result(10)
    # This process also makes the request, and other work shares the machine: a decode on the loop would stall
    # for most of the whole time.
    assert max(stalls) < max(0.05, took / 4), f"{max(stalls):.3f} of {took:.3f} s"
