"""Opens whatever a path names: a checkpoint folder or a flat file."""

from pathlib import Path

from ple_daemon.checkpoint import is_checkpoint, read_checkpoint
from ple_daemon.errors import TableRefusedError
from ple_daemon.flat_file import read_sidecar
from ple_daemon.table_format import TableLayout


def read_layout(path: Path) -> TableLayout:
    """The layout of the table at `path`. Raises TableRefusedError."""
    if not path.exists():
        raise TableRefusedError(f"{path}: does not exist; give a checkpoint folder or a file that build made")
    if path.is_dir():
        if not is_checkpoint(path):
            raise TableRefusedError(f"{path}: not a checkpoint: it has no config.json")
        return read_checkpoint(path)
    return read_sidecar(path).layout
