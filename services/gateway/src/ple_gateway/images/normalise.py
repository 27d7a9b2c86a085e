"""One picture made into what the model takes: an RGB JPEG or PNG of at most `max_px` pixels.

Runs in worker processes only: the libraries below have been crashed by files before.
"""

import io
import math
from dataclasses import dataclass

from PIL import Image, ImageCms, ImageOps, UnidentifiedImageError

from ple_gateway.images.data_url import BadImageError

_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "HEIF")
_SIDE_MULTIPLE_PX = (
    32  # 2 x 2 patches of 16 px: the processor rounds to it, so rounding down here costs nothing
)
_LONGEST_SHAPE = 100  # long side to short side; the processor refuses 200
_FEW_COLOURS = 4096  # screenshots and drawings: PNG is smaller and exact
_EXIF_ORIENTATION = 0x0112
_DEEP_MODES = ("I", "F", "I;16", "I;16B", "I;16L", "I;16N")


@dataclass(frozen=True)
class NormaliseLimits:
    """Pixels."""

    max_source_px: int
    max_side_px: int
    max_px: int


def normalise(data: bytes, limits: NormaliseLimits) -> tuple[str, bytes]:
    """Return (media type, file bytes); the same input gives the same output. Raises BadImageError.

    A baseline RGB JPEG or PNG that needs no change comes back as it is.
    """
    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            _check_header(image, limits)
            if _fits_as_it_is(image, data, limits):
                image.load()  # a broken file must fail here, not in the engine
                return f"image/{(image.format or '').lower()}", data
            return _remade(image, limits)
    except BadImageError:
        raise
    except UnidentifiedImageError as exc:
        raise BadImageError(_unknown_text(data)) from exc
    except MemoryError as exc:
        raise BadImageError("it needs too much memory to decode") from exc
    except Exception as exc:
        # Decoders raise whatever they like on broken files.
        raise BadImageError(f"it cannot be decoded ({type(exc).__name__})") from exc


def _unknown_text(data: bytes) -> str:
    text = "it is no JPEG, PNG, WebP, GIF, BMP, TIFF, AVIF or HEIC file"
    return f"{text} but SVG, which is text: send it as PNG" if b"<svg" in data[:4096].lower() else text


def _check_header(image: Image.Image, limits: NormaliseLimits) -> None:
    width, height = image.size
    if width < 1 or height < 1:
        raise BadImageError("it has no pixels")
    if max(width, height) > limits.max_side_px:
        raise BadImageError(
            f"its sides are {width} x {height}; at most {limits.max_side_px} pixels are accepted"
        )
    if width * height > limits.max_source_px:
        raise BadImageError(f"it has {width * height} pixels; at most {limits.max_source_px} are accepted")


def _fits_as_it_is(image: Image.Image, data: bytes, limits: NormaliseLimits) -> bool:
    width, height = image.size
    plain = image.mode == "RGB" and width * height <= limits.max_px and not image.getexif()
    plain = plain and "icc_profile" not in image.info and "transparency" not in image.info
    if not plain or _canvas_size(image.size) != image.size:
        return False
    if image.format == "JPEG":
        return not image.info.get("progressive") and not image.info.get("progression")
    # 16 bits a channel read as "RGB" too; byte 24 of a PNG is its bit depth.
    return image.format == "PNG" and getattr(image, "n_frames", 1) == 1 and data[24:25] == b"\x08"


def _remade(image: Image.Image, limits: NormaliseLimits) -> tuple[str, bytes]:
    # Only the header: later steps drop both.
    orientation = image.getexif().get(_EXIF_ORIENTATION, 1)
    profile = image.info.get("icc_profile")
    had_alpha = image.has_transparency_data
    target = _target_size(_canvas_size(image.size), limits.max_px)
    if image.format == "JPEG" and target != image.size == _canvas_size(image.size):
        image.draft(None, target)  # decodes at 1/2, 1/4 or 1/8 where that still is large enough
    image.seek(0)
    image.load()
    rgb = _padded(_on_white(_to_srgb(_to_8_bits(image), profile)))
    if target != rgb.size:
        rgb = rgb.resize(
            target, Image.Resampling.LANCZOS, reducing_gap=2.0 if image.format == "JPEG" else None
        )
    rgb = _oriented(rgb, orientation)
    assert rgb.width * rgb.height <= limits.max_px
    return _encode(rgb, exact=had_alpha)


def _target_size(size: tuple[int, int], max_px: int) -> tuple[int, int]:
    """Size (width, height) that keeps the shape; sides are multiples of 32 when it has to shrink."""
    width, height = size
    if width * height <= max_px:
        return size
    scale = math.sqrt(max_px / (width * height))
    shrunk = [
        max(_SIDE_MULTIPLE_PX, int(side * scale) // _SIDE_MULTIPLE_PX * _SIDE_MULTIPLE_PX) for side in size
    ]
    # A side held at 32 leaves the other too long.
    longest = max_px // min(shrunk) // _SIDE_MULTIPLE_PX * _SIDE_MULTIPLE_PX
    return min(shrunk[0], longest), min(shrunk[1], longest)


def _to_8_bits(image: Image.Image) -> Image.Image:
    """Scale deep samples: Pillow's own conversion clips them, which turns 16-bit grey into white."""
    if image.mode not in _DEEP_MODES:
        return image
    image.info.pop("transparency", None)  # a deep sample value, meaningless among 8-bit ones
    if image.mode.startswith("I;16"):
        return image.convert("I").point(lambda value: value * (1 / 257) + 0.5).convert("L")
    low, high = image.getextrema()
    low, high = float(low), float(high)  # type: ignore[arg-type]  # one band has two numbers
    if not math.isfinite(low) or not math.isfinite(high):
        raise BadImageError("its samples are not finite")
    if low >= 0 and high <= 1 and image.mode == "F":
        low, high = 0.0, 1.0
    elif low >= 0 and high <= 65535 and image.mode == "I":
        low, high = 0.0, 65535.0  # what PNG and TIFF readers give for 16 bits
    scale = 255.0 / (high - low) if high > low else 0.0
    return image.convert("F").point(lambda value: value * scale + (0.5 - low * scale)).convert("L")


def _to_srgb(image: Image.Image, profile: bytes | None) -> Image.Image:
    """Apply an embedded colour profile; one that cannot be used is ignored."""
    if image.mode in {"P", "PA"}:
        image = image.convert("RGBA" if image.has_transparency_data else "RGB")
    if not profile or image.mode not in {"RGB", "RGBA", "L", "CMYK"}:
        return image
    alpha = image.getchannel("A") if image.mode == "RGBA" else None
    opaque = image.convert("RGB") if alpha else image
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        converted = ImageCms.profileToProfile(
            opaque, source, ImageCms.createProfile("sRGB"), outputMode="RGB"
        )
    except (ImageCms.PyCMSError, OSError, ValueError):
        return image
    if converted is None:
        return image
    if alpha:
        converted.putalpha(alpha)
    return converted


def _on_white(image: Image.Image) -> Image.Image:
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if not image.has_transparency_data:
        return image.convert("RGB")
    rgba = image.convert("RGBA")
    white = Image.new("RGB", rgba.size, "white")
    white.paste(rgba, mask=rgba.getchannel("A"))
    return white


def _oriented(image: Image.Image, orientation: int) -> Image.Image:
    """Turn as EXIF says; values that EXIF does not know change nothing."""
    if orientation not in range(2, 9):
        return image
    exif = Image.Exif()
    exif[_EXIF_ORIENTATION] = orientation
    carrier = image.copy()
    carrier.info = {"exif": exif.tobytes()}
    return ImageOps.exif_transpose(carrier)


def _canvas_size(size: tuple[int, int]) -> tuple[int, int]:
    """Size (width, height) after padding: the processor refuses sides under 32 px and very long shapes."""
    shortest = max(_SIDE_MULTIPLE_PX, math.ceil(max(size) / _LONGEST_SHAPE))
    return max(size[0], shortest), max(size[1], shortest)


def _padded(image: Image.Image) -> Image.Image:
    """Give small and very long pictures a white border."""
    size = _canvas_size(image.size)
    if size == image.size:
        return image
    canvas = Image.new("RGB", size, "white")
    canvas.paste(image)
    return canvas


def _encode(image: Image.Image, *, exact: bool) -> tuple[str, bytes]:
    clean = Image.frombytes("RGB", image.size, image.tobytes())  # no metadata, whatever it came from
    output = io.BytesIO()
    if exact or clean.getcolors(_FEW_COLOURS) is not None:
        clean.save(output, "PNG", compress_level=1)
        return "image/png", output.getvalue()
    clean.save(output, "JPEG", quality=92, subsampling=0)
    return "image/jpeg", output.getvalue()
