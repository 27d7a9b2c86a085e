"""docs/restarts.md: what the restart matrix saw, with the commit that it saw it of."""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from crowd import LONG_TOKENS, SHORT, SHORT_TOKENS

CHECKOUT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Row:
    """What one case did to the clients, and how long until all three services served again."""

    title: str
    seen: str
    lost_tokens: int
    longest_pause_s: float
    ready_s: float


def as_table(rows: list[Row]) -> str:
    """Markdown."""
    lines = ["| case | what the clients saw | tokens lost | longest pause | all serve after |"]
    lines.append("|---|---|---|---|---|")
    for row in rows:
        pause, ready = f"{row.longest_pause_s:.1f} s", f"{row.ready_s:.1f} s"
        lines.append(f"| {row.title} | {row.seen} | {row.lost_tokens} | {pause} | {ready} |")
    return "\n".join(lines)


def write_doc(path: Path, rows: list[Row]) -> None:
    values = {
        "long": LONG_TOKENS,
        "short": SHORT_TOKENS,
        "others": len(SHORT),
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[1],
    }
    path.write_text(_DOC.format(commit=_commit(), table=as_table(rows), **values))


def _commit() -> str:
    def git(*words: str) -> str:
        return subprocess.check_output(["git", *words], cwd=CHECKOUT, text=True).strip()

    changed = git("status", "--porcelain", "--untracked-files=no")
    return git("rev-parse", "--short=12", "HEAD") + (", with changes" if changed else "")


_DOC = """\
# Restarts

Written by the restart matrix (`make restarts-doc`) at commit {commit}: `deploy/compose.cpu.yaml`, the tiny
model, {cpus} CPUs under a load average of {load:.1f}, this deployment's own share included.

In each case two long streams of {long} tokens are decoding, {others} others of {short} tokens run or wait
in the gateway's queue, and then it happens. "Whole" streams have, token by token and with the same
log-probabilities, what an undisturbed run has; what comes before an error does as well. The pause is
the longest that a long stream went without a token. The last column counts from the first command, or
signal, until each service serves by its own word and by the gateway's; for a stop it includes the time
of being stopped.

{table}

No case makes another service start again. After each, the first long request, asked again, begins with the
same tokens. `tests/containers/test_2_restarts.py` asserts all of this but the times.
"""
