"""JSON objects that name nothing twice: a duplicate key would hide one of two shards."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from ple_daemon.errors import TableRefusedError


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in the file. Raises TableRefusedError."""
    try:
        return parse_object(path, path.read_bytes())
    except OSError as error:
        raise TableRefusedError(f"{path}: cannot be read: {error.strerror}") from error


def parse_object(path: Path, raw: bytes) -> dict[str, Any]:
    """The JSON object in `raw`, which came from `path`. Raises TableRefusedError."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
            raise TableRefusedError(f"{path}: duplicate: names {twice} twice")
        return found

    try:
        value = json.loads(raw, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise TableRefusedError(f"{path}: not JSON ({type(error).__name__})") from error
    if not isinstance(value, dict):
        raise TableRefusedError(f"{path}: not a JSON object")
    return value
