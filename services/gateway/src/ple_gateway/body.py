"""Read a request's body within limits and parse it as one JSON object."""

import asyncio
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import msgspec
from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from ple_gateway.errors import GatewayError, invalid, overloaded
from ple_gateway.settings import Settings

_LARGE_BYTES = 256 * 1024  # worth a thread
_SURROGATE = re.compile("[\ud800-\udfff]")


class ClientLeftError(Exception):
    """The client closed its connection."""


class BodyReader:
    """Reads bodies; all bodies that are held at once are bounded too."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.held_bytes = 0

    @contextmanager
    def holding(self) -> Iterator["HeldBody"]:
        """Account for one body until the block ends."""
        held = HeldBody(self)
        try:
            yield held
        finally:
            self.held_bytes -= held.size_bytes

    def reserve(self, held: "HeldBody", size_bytes: int) -> None:
        """Count `size_bytes` more for `held`; raises 413 for one body too large, 503 for too many."""
        if held.size_bytes + size_bytes > self._settings.max_body_bytes:
            raise GatewayError(
                413,
                f"The request is larger than {self._settings.max_body_bytes} bytes.",
                code="request_too_large",
                headers={"connection": "close"},
            )
        if self.held_bytes + size_bytes > self._settings.max_bodies_bytes:
            raise overloaded("Too many large requests at once.")
        held.size_bytes += size_bytes
        self.held_bytes += size_bytes

    async def read(self, held: "HeldBody", receive: Receive) -> bytes:
        """Read to the end of the body; raises 408 after `body_read_timeout_s`, ClientLeftError."""
        try:
            async with asyncio.timeout(self._settings.body_read_timeout_s):
                return await self._chunks(held, receive)
        except TimeoutError as exc:
            raise GatewayError(
                408,
                "The request's body did not arrive in time.",
                code="timeout",
                headers={"connection": "close"},
            ) from exc

    async def _chunks(self, held: "HeldBody", receive: Receive) -> bytes:
        chunks: list[bytes] = []
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientLeftError
            chunk = message.get("body", b"")
            self.reserve(held, len(chunk))
            chunks.append(chunk)
            if not message.get("more_body", False):
                return b"".join(chunks)

    async def read_object(self, held: "HeldBody", scope: Scope, receive: Receive) -> dict[str, Any]:
        """Read and parse one JSON object; raises GatewayError 400, 408, 413, 415 or 503."""
        headers = Headers(scope=scope)
        _check_type(headers)
        declared = headers.get("content-length", "")
        if declared.isascii() and declared.isdigit() and int(declared) > self._settings.max_body_bytes:
            self.reserve(held, int(declared))  # raises 413 before a byte is read
        body = await self.read(held, receive)
        if len(body) < _LARGE_BYTES:
            return self._take_in(held, body)
        return await asyncio.to_thread(self._take_in, held, body)

    def _take_in(self, held: "HeldBody", body: bytes) -> dict[str, Any]:
        held.digest = hashlib.sha256(body).digest()
        _check_values(body, self._settings.max_json_values)
        parsed = parse_object(body, self._settings.max_json_depth)
        _check_items(parsed, self._settings.max_items)
        return parsed


class HeldBody:
    """Bytes that one request holds."""

    def __init__(self, reader: BodyReader) -> None:
        self.reader = reader
        self.digest = b""
        self.size_bytes = 0


def _check_type(headers: Headers) -> None:
    content_type = headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if content_type != "application/json" and not re.fullmatch(r"application/[\w.-]+\+json", content_type):
        raise GatewayError(
            415, "Send JSON with 'Content-Type: application/json'.", code="unsupported_media_type"
        )
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise GatewayError(415, "Compressed requests are not accepted.", code="unsupported_media_type")


def _check_values(body: bytes, max_values: int) -> None:
    """Bound what parsing allocates: two bytes of JSON can become an object of 64 bytes.

    Counts commas and brackets, also those inside strings, which is quick.
    """
    if len(body) > max_values and sum(body.count(mark) for mark in (b",", b"[", b"{")) > max_values:
        raise invalid(f"The JSON may hold more than {max_values} values: it has more commas and brackets.")


def parse_object(body: bytes, max_depth: int) -> dict[str, Any]:
    """Parse one JSON object: integers exact, the last of duplicate keys wins, NaN and Infinity refused.

    What strict parsers refuse in strings (lone surrogates, raw control characters, broken UTF-8) is repaired.
    """
    try:
        parsed = msgspec.json.decode(body)
    except RecursionError as exc:
        raise invalid(f"The JSON is nested deeper than {max_depth} levels.") from exc
    except msgspec.DecodeError as exc:
        parsed = _repaired(body, str(exc), max_depth)
    if not isinstance(parsed, dict):
        raise invalid("The request's body must be a JSON object.")
    _check_depth(parsed, max_depth)
    return parsed


def _check_items(parsed: dict[str, Any], max_items: int) -> None:
    """Refuse more messages, parts, tools or prompts than any real conversation has: each costs time."""
    for name, value in parsed.items():
        if not isinstance(value, list) or not value or isinstance(value[0], int):  # token ids
            continue
        parts = (item.get("content") for item in value if isinstance(item, dict))
        if len(value) + sum(len(part) for part in parts if isinstance(part, list)) > max_items:
            raise invalid(f"`{name}` has more than {max_items} items and parts.", param=name)


def _repaired(body: bytes, complaint: str, max_depth: int) -> Any:
    try:
        parsed = json.loads(
            body.decode("utf-8", "replace"),
            strict=False,
            parse_constant=_refuse_constant,
            parse_float=_finite,
        )
    except RecursionError as exc:
        raise invalid(f"The JSON is nested deeper than {max_depth} levels.") from exc
    except ValueError as exc:
        raise invalid(f"The request's body is not valid JSON: {complaint}") from exc
    _check_depth(parsed, max_depth)
    return _clean(parsed)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"{text} is out of range")
    return value


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return _SURROGATE.sub("\ufffd", value).replace("\0", "\ufffd")
    if isinstance(value, list):
        return [_clean(item) for item in value]
    if isinstance(value, dict):
        return {_clean(key): _clean(item) for key, item in value.items()}
    return value


def _check_depth(value: Any, max_depth: int) -> None:
    level = [value]
    for _ in range(max_depth):
        level = [
            item
            for node in level
            for item in (node.values() if isinstance(node, dict) else node)
            if isinstance(item, dict | list)
        ]
        if not level:
            return
    raise invalid(f"The JSON is nested deeper than {max_depth} levels.")
