"""Opens whatever a path names: a checkpoint folder or a flat file."""

from pathlib import Path

from ple_daemon.checkpoint import is_checkpoint, read_checkpoint
from ple_daemon.errors import TableRefusedError
from ple_daemon.flat_file import read_sidecar
from ple_daemon.gather import Advice
from ple_daemon.table import Table
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


def open_table(path: Path, advice: Advice | None = None) -> Table:
    """The open table at `path`. Raises TableRefusedError, also for a flat file unlike its sidecar."""
    layout = read_layout(path)
    table = Table(layout, advice)
    if not path.is_dir() and read_sidecar(path).fingerprint != table.fingerprint.hex():
        table.close()
        raise TableRefusedError(f"{path}: its content is not what its description says; build it again")
    return table
