"""Names a table by its content, wherever and however it is stored.

SHA-256 over the row type, the width, the number of rows, the hash constants, the scale's bits, and the
bytes of the first row, the last row and 4,096 rows at positions that a fixed seed draws. Where the segments
begin does not enter: a flat file equals the checkpoint that it was made of.

What it does not prove: it samples. Damage that misses every sampled row goes unseen; only `ple-daemon
verify`, which reads everything, sees it. Fit for "is this the table that I talked to before", not for
"is this table intact".
"""

import hashlib
import json
from collections.abc import Callable
from typing import Any

import numpy as np

from ple_daemon.table_format import TableLayout

SAMPLED_ROWS = 4096
_SEED = 20_261_129
_SCHEME = b"ple-table-fingerprint-1\n"


def fingerprint(layout: TableLayout, lookup: Callable[[Any], Any]) -> bytes:
    """32 bytes. `lookup` maps int64 row ids to their bytes, uint8 [ids * row_bytes]."""
    digest = hashlib.sha256(_SCHEME)
    digest.update(_description(layout))
    digest.update(lookup(_sampled_rows(layout.rows)).tobytes())
    return digest.digest()


def _description(layout: TableLayout) -> bytes:
    constants = layout.constants
    fields = {
        "row_type": layout.row_type.value,
        "row_elements": layout.row_elements,
        "rows": layout.rows,
        "scale": layout.scale.hex(),
        "ngram_size": constants.ngram_size,
        "heads_per_ngram": constants.heads_per_ngram,
        "eos_token_id": constants.eos_token_id,
        "multipliers": constants.multipliers,
        "head_sizes": constants.head_sizes,
        "head_offsets": constants.head_offsets,
    }
    return json.dumps(fields, sort_keys=True).encode()


def _sampled_rows(rows: int) -> Any:
    """First and last row, then a Weyl sequence through a mixer: the same rows on every machine."""
    with np.errstate(over="ignore"):
        mixed = (np.arange(SAMPLED_ROWS, dtype=np.uint64) + np.uint64(_SEED)) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(31)
        mixed *= np.uint64(0xBF58476D1CE4E5B9)
        mixed ^= mixed >> np.uint64(29)
    return np.concatenate([[0, rows - 1], (mixed % np.uint64(rows)).astype(np.int64)])
