"""What a scenario has found so far: it outlives a crash of the scenario."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

WHERE = "findings"
"""The setting that names the file."""


def keep(settings: dict[str, Any], found: dict[str, Any]) -> None:
    """Write them, in place of those of before."""
    path = Path(settings[WHERE])
    path.with_suffix(".part").write_text(json.dumps(found))
    path.with_suffix(".part").rename(path)


def kept(path: Path) -> dict[str, Any]:
    """Those of a scenario that has ended; none if it kept none."""
    return json.loads(path.read_text()) if path.exists() else {}
