"""The ways in which clients write a picture into a message."""

import re
from typing import Any

_SCHEME = re.compile(r"\s*[A-Za-z][A-Za-z0-9+.-]*:")
_TYPES = frozenset({"image_url", "input_image", "image", "img", "picture", "image_base64"})
_FILE_TYPES = frozenset({"file", "input_file", "document", "media", "blob"})
_MEDIA_TYPES = ("media_type", "mime_type", "mimeType", "mediaType")
# What may hold the picture: a URL, base64, or an object with one of these again.
_HOLDERS = (
    "image_url", "image", "image_base64", "source", "inline_data", "inlineData", "file", "url", "uri",
    "base64", "data", "bytes", "file_data", "fileData", "file_uri", "fileUri",
)  # fmt: skip
_UNTYPED = ("image_url", "image", "inline_data", "inlineData", "source")
_MAX_DEPTH = 4


def is_picture(part: dict[str, Any]) -> bool:
    """Whether a part is a picture, spelt as OpenAI, Anthropic, Gemini, MCP, Bedrock or AI SDKs do."""
    kind = part.get("type")
    if kind is not None and not isinstance(kind, str):
        return False
    if kind in _TYPES:
        return True
    if kind in _FILE_TYPES:
        return _media_type(part, 0).startswith("image/") or str(_find(part, 0))[:11].lower() == "data:image/"
    return kind is None and any(name in part for name in _UNTYPED)


def picture_url(part: dict[str, Any]) -> str | None:
    """Return a picture's URL; base64 by itself becomes a data URL. None when there is none."""
    found = _find(part, 0)
    if not found or _SCHEME.match(found[:40]):
        return found
    return f"data:{_media_type(part, 0)};base64,{found}"


def _find(value: Any, depth: int) -> str | None:
    if isinstance(value, str):
        return value or None
    if isinstance(value, dict) and depth < _MAX_DEPTH:
        for name in _HOLDERS:
            found = _find(value.get(name), depth + 1)
            if found:
                return found
    return None


def _media_type(value: Any, depth: int) -> str:
    """The type that the client declares: only tells pictures from other files, since files are sniffed."""
    if not isinstance(value, dict) or depth >= _MAX_DEPTH:
        return ""
    for name in _MEDIA_TYPES:
        if isinstance(value.get(name), str):
            return str(value[name])[:100]
    return next(filter(None, (_media_type(value.get(name), depth + 1) for name in _HOLDERS)), "")
