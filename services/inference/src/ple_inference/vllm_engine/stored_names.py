"""Refuses tensors that the model has no place for, and small ones that are missing or of another kind.

vLLM stops at the first name that it cannot place, and copies numbers of any type into bf16, without a scale:
both when the GPUs are taken already.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ple_inference.vllm_engine.rank_modules import DRAFT, ROOT, ROOT_OF_TEXT, TABLE, VISION, text_name
from ple_inference.vllm_engine.refused import Refused
from ple_inference.vllm_engine.small_shapes import (
    Shape,
    Shapes,
    fits,
    is_hash_constant,
    vision_shapes,
)
from ple_inference.vllm_engine.tensors import Tensor, Tensors

NUMBERS = ("BF16", "F16", "F32")
# What vLLM's loader of this model passes over, or puts beside its K/V.
_PASSED_OVER = re.compile(
    r"hashstats_|token_lookup|rotary(_pos)?_emb\.(inv_freq|(cos|sin)_cached)$|self_attn\.(.*\.)?_?[kv]_scale$"
    r"|^hyper_connection_mixer\.block_inject_weight\."
)
_LAYER = re.compile(r"layers\.(\d+)\.(?:mlp\.experts\.(\d+)\.)?")
_BLOCK = re.compile(rf"{re.escape(VISION)}blocks\.(\d{{1,9}})\.")
_MOST_DIGITS = 9
AGAIN = "download it again, or use another checkpoint"
OTHER_CONFIG = "take the config.json of this checkpoint, or another checkpoint"


def decoder_names(tensors: Tensors, *, text_only: bool) -> dict[str, str]:
    """The decoder's tensors: name without the architecture's prefix -> name in the checkpoint.

    Neither the table's nor those that vLLM passes over are among them. Raises Refused.
    """
    roots = (ROOT_OF_TEXT, ROOT) if text_only else (ROOT,)
    found: dict[str, str] = {}
    for name, tensor in tensors.items():
        # The draft module is not read: there is no profile with one.
        if name.startswith((DRAFT, VISION)) or TABLE in name:
            continue
        if not name.startswith((*roots, "lm_head.")):
            raise Refused(f"{tensor.file.name}: {name} is no tensor of this architecture; {OTHER_CONFIG}")
        short = text_name(name)
        if short in found:
            raise Refused(f"{tensor.file.name}: {name} and {found[short]} are the same tensor; {AGAIN}")
        if not _PASSED_OVER.search(short):
            found[short] = name
    return found


def refuse_other_layers(names: Mapping[str, str], text: Mapping[str, Any]) -> None:
    """Layers and experts that the config does not have. Raises Refused."""
    fields = ("num_hidden_layers", "num_experts")
    for short, name in names.items():
        layer = _LAYER.match(short)
        for field, number in zip(fields, layer.groups() if layer else (), strict=False):
            if number is not None and not _is_index(number, text[field]):
                raise Refused(
                    f"the checkpoint has {name}, and config.json says that {field} is {text[field]}; "
                    f"{OTHER_CONFIG}"
                )


def _is_index(number: str, count: int) -> bool:
    """Written as an index is: 03 is none, and thousands of digits are no number to compute with."""
    return len(number) <= _MOST_DIGITS and str(int(number)) == number and int(number) < count


def check_small(tensors: Tensors, names: Mapping[str, str], expected: Shapes) -> None:
    """Norms, convolutions and hash constants of the decoder, by `decoder_shapes`. Raises Refused."""
    _check(expected, {short: tensors[names[short]] for short in expected if short in names})


def check_vision(tensors: Tensors, config: Mapping[str, Any]) -> None:
    """Raises Refused."""
    found = {name: tensor for name, tensor in tensors.items() if name.startswith(VISION)}
    expected: Shapes = {}
    if "vision_config" in config:
        vision = config["vision_config"]
        blocks = [int(block[1]) for block in map(_BLOCK.match, found) if block]
        expected = vision_shapes(vision, vision.get("depth", max(blocks, default=0) + 1))
    _check(expected, found)
    refuse_strangers((name for name in found if name not in expected), tensors)


def refuse_strangers(names: Iterable[str], tensors: Tensors) -> None:
    """Tensors that have no place. Raises Refused."""
    stranger = next(iter(names), None)
    if stranger is not None:
        raise Refused(
            f"{tensors[stranger].file.name}: the model of config.json has no place for {stranger}; "
            f"{OTHER_CONFIG}"
        )


def _check(expected: Shapes, found: Mapping[str, Tensor]) -> None:
    for name, shape in expected.items():
        if name not in found:
            raise Refused(f"the checkpoint has no {name}; {AGAIN}")
        tensor = found[name]
        types = ("I64",) if is_hash_constant(name) else NUMBERS
        if tensor.dtype not in types:
            raise Refused(f"{tensor.file.name}: {name} is {tensor.dtype}, not {' or '.join(types)}; {AGAIN}")
        if not fits(tensor.shape, shape):
            raise Refused(
                f"{tensor.file.name}: {name} is {list(tensor.shape)}, the config wants {_shown(shape)}; "
                f"{OTHER_CONFIG}"
            )


def _shown(shape: Shape) -> str:
    return f"[{', '.join('any' if size is None else str(size) for size in shape)}]"
