"""Where the services of one checkout meet: a private folder with a path that fits a Unix socket."""

import hashlib
import tempfile
from collections.abc import Mapping
from pathlib import Path

TABLE_SOCKET_NAME = "table.sock"

# sun_path holds 108 bytes and the kernel wants room for a terminating NUL.
MAX_SOCKET_PATH_BYTES = 107


def run_directory(environ: Mapping[str, str], anchor: Path) -> Path:
    """The run directory of the checkout at `anchor`, short however deep the checkout lies."""
    digest = hashlib.sha256(str(anchor.resolve()).encode()).hexdigest()[:8]
    base = environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return Path(base) / f"triplex-{digest}"


def check_socket_path(path: Path) -> None:
    """Refuse a path that bind() would refuse. Raises ValueError with one line that says what to do."""
    length = len(bytes(path.absolute()))
    if length > MAX_SOCKET_PATH_BYTES:
        raise ValueError(
            f"socket path {path} has {length} bytes and a Unix socket takes {MAX_SOCKET_PATH_BYTES}: "
            "choose a shorter run directory"
        )
