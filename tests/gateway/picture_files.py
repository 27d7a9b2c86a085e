"""One small file of every picture format and kind that the gateway takes, and ways to damage them."""

import io
import random
from functools import cache

import pillow_heif
from hypothesis import strategies as st
from PIL import Image

pillow_heif.register_heif_opener()


def _saved(image, kind, **options):
    output = io.BytesIO()
    image.copy().save(output, kind, **options)  # saving leaves a JPEG's options in an image
    return output.getvalue()


@cache
def picture_files() -> dict[str, bytes]:
    """Name -> file."""
    rgb = Image.frombytes("RGB", (12, 9), random.Random(1).randbytes(324)).resize((48, 36))
    rgba = rgb.convert("RGBA")
    rgba.putalpha(rgb.convert("L"))

    def frames():
        return {"save_all": True, "append_images": [rgb.rotate(90), rgb.copy()]}

    exif = Image.Exif()
    exif[0x0112] = 6
    return {
        "jpeg": _saved(rgb, "JPEG", exif=exif),
        "jpeg progressive": _saved(rgb, "JPEG", progressive=True),
        "jpeg cmyk": _saved(rgb.convert("CMYK"), "JPEG"),
        "mpo": _saved(rgb, "MPO", **frames()),
        "png": _saved(rgb, "PNG"),
        "png alpha": _saved(rgba, "PNG", exif=exif),
        "png palette": _saved(rgb.quantize(8), "PNG", transparency=3),
        "png deep": _saved(Image.new("I;16", (40, 30), 999), "PNG"),
        "apng": _saved(rgb, "PNG", **frames()),
        "webp": _saved(rgb, "WEBP"),
        "webp lossless": _saved(rgba, "WEBP", lossless=True),
        "webp animated": _saved(rgb, "WEBP", **frames()),
        "gif": _saved(rgb, "GIF", **frames()),
        "bmp": _saved(rgb, "BMP"),
        "tiff": _saved(rgb, "TIFF", **frames()),
        "tiff lzw": _saved(rgb, "TIFF", compression="tiff_lzw"),
        "tiff fax": _saved(rgb.convert("1"), "TIFF", compression="group4"),
        "tiff float": _saved(Image.new("F", (40, 30), 0.5), "TIFF"),
        "avif": _saved(rgb, "AVIF"),
        "heic": _saved(rgb, "HEIF"),
    }


_NUMBERS = [
    b"\xff\xff\xff\xff",
    b"\x7f\xff\xff\xff",
    b"\xff\xff\xff\x7f",
    b"\0\0\0\0",
    b"\0\0\xff\xff",
    b"\xff\xff",
]
_CHANGES = st.tuples(
    st.sampled_from(["byte", "number", "cut", "repeat", "remove", "insert"]),
    st.floats(0, 1, exclude_max=True),
    st.integers(0, 255),
)


def _changed(data: bytes, change: tuple[str, float, int]) -> bytes:
    how, where, value = change
    # Most damage in headers, where sizes and counts stand.
    at = int(where**2 * len(data))
    before, after = data[:at], data[at:]
    if how == "byte":
        return before + bytes([value]) + after[1:]
    if how == "number":
        number = _NUMBERS[value % len(_NUMBERS)]
        return before + number + after[len(number) :]
    if how == "cut":
        return before
    if how == "repeat":
        return before + after[:value] * 3 + after
    return before + (after[value:] if how == "remove" else bytes([value] * 8) + after)


@st.composite
def damaged_pictures(draw: st.DrawFn) -> bytes:
    """A file of any kind with a few changes."""
    data = picture_files()[draw(st.sampled_from(sorted(picture_files())))]
    for change in draw(st.lists(_CHANGES, max_size=4)):
        data = _changed(data, change) if data else data
    return data
