"""The GPUs that vLLM would see, by nvidia-smi: torch would make a CUDA context only to look."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass

from ple_inference.vllm_engine.refused import Refused

_ASK_DEADLINE_S = 30
_MIB = 2**20
_FIELDS = "index,uuid,name,memory.total,memory.reserved,memory.free"


@dataclass(frozen=True)
class Gpu:
    index: int
    uuid: str
    name: str
    total_bytes: int
    """Without what the driver keeps for itself: as CUDA, and so vLLM, counts it."""
    free_bytes: int


def visible_gpus(visible_devices: str | None) -> list[Gpu]:
    """In the order of CUDA_VISIBLE_DEVICES, whose value is given. Raises Refused when nvidia-smi fails."""
    command = ["nvidia-smi", f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_DEADLINE_S, check=True)  # noqa: S603
        gpus = [_parse(line) for line in done.stdout.splitlines() if line.strip()]
    except FileNotFoundError:
        raise Refused("no nvidia-smi on PATH: the vllm engine needs NVIDIA GPUs and their driver") from None
    except subprocess.TimeoutExpired:
        raise Refused(f"nvidia-smi gave no answer within {_ASK_DEADLINE_S} s: the driver hangs") from None
    except subprocess.CalledProcessError as error:
        reason = " ".join((error.stderr or error.stdout or "no output").split())
        raise Refused(f"nvidia-smi failed: {reason[:200]}") from None
    except ValueError as error:
        raise Refused(f"nvidia-smi answers what cannot be read: {error}") from None
    return gpus if visible_devices is None else _chosen(gpus, visible_devices)


def _parse(line: str) -> Gpu:
    index, uuid, name, total, reserved, free = (part.strip() for part in line.split(","))
    # Drivers that do not tell say [N/A], or a word like it.
    kept = int(reserved) if reserved.isdigit() else 0
    return Gpu(int(index), uuid, name, (int(total) - kept) * _MIB, int(free) * _MIB)


def _chosen(gpus: list[Gpu], visible_devices: str) -> list[Gpu]:
    """CUDA reads its list up to the first device that is not there."""
    chosen: list[Gpu] = []
    for name in re.split(r"\s*,\s*", visible_devices.strip()):
        found = [gpu for gpu in gpus if name and (name == str(gpu.index) or gpu.uuid.startswith(name))]
        if len(found) != 1 or found[0] in chosen:
            break
        chosen += found
    return chosen
