"""What a log says of a kernel that failed."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

# Of compute-sanitizer, of what a check raises, of CUDA: whoever comes first saw it first.
_FAULT = re.compile(
    r"(========= (?:Invalid|Race|Misaligned).*|ValueError: step \d+.*|[\w.]*Error: CUDA error: .*"
    r"|Triton Error \[CUDA\].*|CUDA error: .*|device-side assert.*|\b[A-Z]\w*Error: .*)"
)
_FRAME = re.compile(r'File "[^"]*?([^/"]+)", line (\d+), in (\w+)')
_SANITIZED = re.compile(r"=========\s+at (.*)")
_NOTICED = (
    "Engine core initialization failed",
    "WorkerProc initialization failed",
    "Tokenizer not available",
)
DEBUGGER_S = 60.0


def fault_in(log: str) -> str:
    """The first error that is not of a process that only noticed, and where: a kernel or a Python frame."""
    lines = log.splitlines()
    for number, words in enumerate(lines):
        match = _FAULT.search(words)
        if match is None or any(noticed in words for noticed in _NOTICED):
            continue
        place = _place(lines, number)
        return match.group(1).strip() + (f" [{place}]" if place else "")
    return "no error in the log: it ran out of time"


def _place(lines: Sequence[str], number: int) -> str:
    """The kernel that compute-sanitizer names on the next line, or the last Python frame before an error."""
    if kernel := next(filter(None, map(_SANITIZED.search, lines[number : number + 2])), None):
        return kernel.group(1)
    before = [match for line in lines[max(0, number - 4) : number] if (match := _FRAME.search(line))]
    return "{}:{} {}".format(*before[-1].groups()) if before else ""


def kernel_of(core: Path, debugger: Path) -> str:
    """The kernel of a GPU core dump, by cuda-gdb."""
    if not debugger.exists():
        return f"{core.name} is there, {debugger.name} is not"
    command = [str(debugger), "-nx", "-batch", "-ex", f"target cudacore {core}", "-ex", "bt"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=DEBUGGER_S, check=False).stdout
    except subprocess.TimeoutExpired:
        return f"{debugger.name} took more than {DEBUGGER_S:g} s for {core.name}"
    telling = [
        line for line in said.splitlines() if "triggered" in line or line.startswith(("#0", "CUDA Exc"))
    ]
    return " | ".join(telling) or f"{debugger.name} says nothing of {core.name}"
