"""Data URLs to the vision tower's inputs."""

from __future__ import annotations

import binascii
import io
import json
import warnings
from pathlib import Path

import pybase64
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from ple_inference.reference.forward import ImageInputs

_MAX_ASPECT = 200


class ImageError(Exception):
    """An image that cannot be used; one line for the client."""


class ImageReader:
    """Decodes and scales as the checkpoint's preprocessor_config.json says. Thread-safe."""

    def __init__(self, folder: Path, max_px: int) -> None:
        path = folder / "preprocessor_config.json"
        config = json.loads(path.read_text()) if path.exists() else {}
        names = ("size", "patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std")
        known = {name: config[name] for name in names if name in config}
        self._processor = Qwen2VLImageProcessorPil(**known)
        self._max_px = max_px

    def read(self, urls: list[str]) -> ImageInputs:
        """Raises ImageError."""
        images = [self._open(url) for url in urls]
        batch = self._processor(images=images, return_tensors="pt")
        return ImageInputs(batch["pixel_values"], batch["image_grid_thw"].to(torch.int64))

    def placeholders(self, images: ImageInputs) -> list[int]:
        """How many tokens each image takes."""
        merge = self._processor.merge_size**2
        return [int(patches) // merge for patches in images.grid_thw.prod(-1)]

    def _open(self, url: str) -> Image.Image:
        data = _data_of(url)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", Image.DecompressionBombWarning)
                image = Image.open(io.BytesIO(data))
                width, height = image.size
                if width * height > self._max_px:
                    raise ImageError(f"the image has {width * height} pixels, more than {self._max_px}")
                if max(width, height) > _MAX_ASPECT * min(width, height):
                    raise ImageError(f"the image is {width} x {height}: too narrow")
                # Pixels as a viewer shows them, on white where they are transparent.
                upright = ImageOps.exif_transpose(image)
        except ImageError:
            raise
        except UnidentifiedImageError as error:
            raise ImageError("not an image of a known format") from error
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError, Warning) as error:
            raise ImageError(f"not a readable image: {error}") from error
        return _opaque(upright)


def _data_of(url: str) -> bytes:
    header, comma, payload = url.partition(",")
    if not header.startswith("data:") or not comma:
        raise ImageError("only data: URLs are read; send the image itself")
    if not header.endswith(";base64"):
        raise ImageError("the data URL must be base64")
    try:
        return pybase64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageError(f"the data URL is not base64: {error}") from error


def _opaque(image: Image.Image) -> Image.Image:
    if not image.has_transparency_data:
        return image.convert("RGB")
    layer = image.convert("RGBA")
    white = Image.new("RGBA", layer.size, "white")
    return Image.alpha_composite(white, layer).convert("RGB")
