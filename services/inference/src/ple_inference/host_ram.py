"""How much of the host's RAM this process can still take, by the kernel and by the limits of its cgroups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")
_UNLIMITED = 1 << 60
"""Larger limits are none."""


def available_bytes(root: Path = _ROOT) -> int:
    """The least of MemAvailable and what each cgroup leaves. `root`: where /proc and /sys are."""
    return min([_of_machine(root), *_of_cgroups(root)])


def _of_machine(root: Path) -> int:
    lines = (root / "proc/meminfo").read_text().splitlines()
    kib = next(line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return int(kib) * 1024


def _of_cgroups(root: Path) -> Iterator[int]:
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _left(root / "sys/fs/cgroup", path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            limit, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
            yield from _left(root / "sys/fs/cgroup/memory", path, limit, used, "total_inactive_file")


def _left(mount: Path, path: str, limit_name: str, used_name: str, cache_name: str) -> Iterator[int]:
    """Of a cgroup and all above it. In a container its own is the mount, whatever its path is outside."""
    folder = mount / path.lstrip("/")
    for group in (folder, *folder.parents):
        if group == mount.parent:
            return
        limit, used = _number(group / limit_name), _number(group / used_name)
        if limit is not None and used is not None and limit < _UNLIMITED:
            yield max(0, limit - used + _cache(group / "memory.stat", cache_name))


def _number(path: Path) -> int | None:
    """None: no such file, or no limit."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _cache(path: Path, name: str) -> int:
    """Files that the kernel drops before it refuses memory."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[0] == name), 0)
