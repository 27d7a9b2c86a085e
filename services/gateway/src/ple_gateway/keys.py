"""API keys: how they are written down, and how a client's is recognised."""

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass

from ple_gateway.scheduler import Lane

_HASHED = "sha256:"
_HEX = re.compile(r"[0-9a-fA-F]{64}")
_SENDABLE = re.compile(r"[!-~]+")  # in a header
_LANES: dict[str, Lane] = {lane.label: lane for lane in Lane}


@dataclass(frozen=True)
class ApiKey:
    """A key as it is kept: its digest, the lane of its requests, and a name that tells nothing."""

    name: str
    digest: bytes
    lane: Lane | None = None


def parse_keys(text: str) -> tuple[ApiKey, ...]:
    """Read keys, one a line or comma separated: `KEY` or `sha256:HEX`, then a lane if it has one of its own.

    Raises ValueError, which quotes no key.
    """
    entries = [entry.strip() for entry in re.split(r"[,\n]", text)]
    return tuple(_parse(entry, index + 1) for index, entry in enumerate(filter(None, entries)))


def _parse(entry: str, number: int) -> ApiKey:
    key, _, lane = entry.partition(" ")
    lane = lane.strip()
    if entry.startswith("#"):
        raise ValueError(f"API key {number} begins with #: keys stand alone, without comments")
    if not _SENDABLE.fullmatch(key):
        raise ValueError(f"API key {number} holds characters that no client can send; use plain ASCII")
    if lane and lane not in _LANES:
        raise ValueError(
            f"API key {number} is followed by something that is no lane: interactive or background"
        )
    if not key.startswith(_HASHED):
        return ApiKey(f"key{number}", _digest(key), _LANES.get(lane))
    value = key.removeprefix(_HASHED)
    if not _HEX.fullmatch(value):
        raise ValueError(
            f"API key {number} begins with {_HASHED} and is not followed by 64 hexadecimal digits"
        )
    return ApiKey(f"key{number}", bytes.fromhex(value), _LANES.get(lane))


def new_key() -> tuple[str, str]:
    """Make a key; returns it and the entry that recognises it."""
    key = f"sk-{secrets.token_urlsafe(32)}"
    return key, _HASHED + _digest(key).hex()


def find_key(keys: Iterable[ApiKey], given: str) -> ApiKey | None:
    """Return the known key that a client gave."""
    # Digests have one length and all are compared, so that timing tells neither length nor position.
    digest = _digest(given)
    matches = [key for key in keys if hmac.compare_digest(digest, key.digest)]
    return matches[0] if matches else None


def _digest(key: str) -> bytes:
    # Keys are long and random: a slow hash, made for passwords, would protect nothing more.
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()
