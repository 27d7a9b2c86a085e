"""A file of random bytes on the drive that is to be tested, gone afterwards."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from tqdm import tqdm

from ple_daemon.errors import DaemonError

_CHUNK_BYTES = 8 * 1024 * 1024
# Left free beside the scratch file: filling a drive to the brim changes what it does.
_SPARE_BYTES = 1024**3


@contextmanager
def scratch_file(folder: Path, size_bytes: int) -> Iterator[Path]:
    """Written, not reserved: a drive answers for blocks never written without reading them.

    Raises DaemonError when there is no room for it.
    """
    free = shutil.disk_usage(folder).free
    if free < size_bytes + _SPARE_BYTES:
        raise DaemonError(
            f"{folder}: {free:,} bytes free, a scratch file of {size_bytes:,} and {_SPARE_BYTES:,} to spare "
            "do not fit; choose a smaller --size-gib or an existing file"
        )
    path = folder / f".ple-probe-{os.getpid()}.tmp"
    try:
        _write(path, size_bytes)
        yield path
    finally:
        path.unlink(missing_ok=True)


def _write(path: Path, size_bytes: int) -> None:
    rng = np.random.default_rng()
    with (
        path.open("xb") as file,
        tqdm(total=size_bytes, unit="B", unit_scale=True, desc="write", leave=False) as bar,
    ):
        for start in range(0, size_bytes, _CHUNK_BYTES):
            chunk = rng.bytes(min(_CHUNK_BYTES, size_bytes - start))
            file.write(chunk)
            bar.update(len(chunk))
        file.flush()
        os.fsync(file.fileno())
