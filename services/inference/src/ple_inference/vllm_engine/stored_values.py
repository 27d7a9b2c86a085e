"""Refuses scales that are no numbers or were never written, and packed weights that say another shape.

The headers do not tell. What is read is a thirtieth of an INT4-mixed checkpoint, and much less of an FP8 one.
"""

from __future__ import annotations

import errno
import os
import struct
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ple_inference.checkpoint import CheckpointError
from ple_inference.quantized.scheme import BLOCK_SCALE, SCALE, SHAPE
from ple_inference.vllm_engine.linear_shapes import LinearShapes
from ple_inference.vllm_engine.rank_modules import DRAFT, text_name
from ple_inference.vllm_engine.refused import Refused
from ple_inference.vllm_engine.stored_names import AGAIN
from ple_inference.vllm_engine.tensors import Tensor, Tensors

# Integer to look at the bits by, and the exponent of what is infinite or no number.
_EXPONENTS = {"F16": ("<u2", 0x7C00), "BF16": ("<u2", 0x7F80), "F32": ("<u4", 0x7F80_0000)}


def check_values(tensors: Tensors, text: Mapping[str, Any], *, written: bool) -> None:
    """Of a checkpoint whose headers `check_stored` let pass. Raises Refused, CheckpointError.

    `written`: whether there must be values at all. Without, what lies in a hole of its file is passed over:
    headers are enough to plan with.
    """
    shapes = LinearShapes(text)
    for path, found in _by_file(tensors).items():
        try:
            with path.open("rb", buffering=0) as file:
                for name, tensor in sorted(found.items(), key=lambda item: item[1].offset_bytes):
                    if written or not _is_hole(file.fileno(), tensor):
                        _check(
                            name,
                            tensor,
                            os.pread(file.fileno(), tensor.size_bytes, tensor.offset_bytes),
                            shapes,
                        )
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}; {AGAIN}") from error


def _by_file(tensors: Tensors) -> Mapping[Path, dict[str, Tensor]]:
    found: defaultdict[Path, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        if name.endswith((SCALE, SHAPE, BLOCK_SCALE)) and not name.startswith(DRAFT):
            found[tensor.file][name] = tensor
    return found


def _is_hole(descriptor: int, tensor: Tensor) -> bool:
    """Whether none of the tensor was ever written. False on disks that do not tell."""
    try:
        data_bytes = os.lseek(descriptor, tensor.offset_bytes, os.SEEK_DATA)
    except OSError as error:
        return error.errno == errno.ENXIO  # no data from there to the end
    return data_bytes >= tensor.offset_bytes + tensor.size_bytes


def _check(name: str, tensor: Tensor, content: bytes, shapes: LinearShapes) -> None:
    where = f"{tensor.file.name}: {name}"
    if len(content) != tensor.size_bytes:
        raise CheckpointError(f"{tensor.file} ends within {name}; {AGAIN}")
    if name.endswith(SHAPE):
        said, expected = struct.unpack("<2q", content), shapes.of(text_name(name.removesuffix(SHAPE)))
        if said != expected:
            raise Refused(f"{where} says {list(said)}, the config wants {list(expected or ())}; {AGAIN}")
        return
    integer, exponent = _EXPONENTS[tensor.dtype]
    bits = np.frombuffer(content, integer)
    if ((bits & exponent) == exponent).any():
        raise Refused(f"{where} holds what is infinite or no number; {AGAIN}")
    # The sign aside. Single zeros are scales of weights that are all zero.
    if not (bits << 1).any():
        raise Refused(f"{where} is nothing but zeros: it was never written; {AGAIN}")
