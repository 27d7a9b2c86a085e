"""Server-sent events as OpenAI's clients read them."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.responses import StreamingResponse

from ple_inference.reference.api.errors import ApiError
from ple_inference.reference.api.generation import ClientGoneError

_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


def event_stream(chunks: AsyncGenerator[dict[str, Any]]) -> StreamingResponse:
    """Send each chunk as one event, then [DONE]; an error after the start is an event, too."""
    return StreamingResponse(_frames(chunks), media_type="text/event-stream; charset=utf-8", headers=_HEADERS)


async def _frames(chunks: AsyncGenerator[dict[str, Any]]) -> AsyncGenerator[bytes]:
    async with aclosing(chunks):
        try:
            async for chunk in chunks:
                yield _frame(chunk)
        except ApiError as error:
            yield _frame(error.body)
        except ClientGoneError:
            return
        yield b"data: [DONE]\n\n"


def _frame(chunk: dict[str, Any]) -> bytes:
    # Raw line separators of JavaScript are legal here; one line a frame is what matters.
    return b"data: " + json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
