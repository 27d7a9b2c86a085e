"""Memory of the machine and of this process, from /proc."""

import resource
from pathlib import Path


def available_bytes() -> int:
    """What could be used without swapping; the page cache counts as available."""
    return _kib("/proc/meminfo", "MemAvailable:") * 1024


def anonymous_bytes() -> int:
    """Resident anonymous memory of this process."""
    return _kib("/proc/self/status", "RssAnon:") * 1024


def page_table_bytes() -> int:
    """Page tables of this process: 8 bytes for each page of the table that was ever touched."""
    return _kib("/proc/self/status", "VmPTE:") * 1024


def major_faults() -> int:
    """Page reads that this process waited for since it started."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


def _kib(path: str, name: str) -> int:
    for line in Path(path).read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1])
    return 0
