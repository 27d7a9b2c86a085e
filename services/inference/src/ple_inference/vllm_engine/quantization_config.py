"""What a config.json says of quantized weights."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ple_inference.quantized.scheme import Scheme
from ple_inference.vllm_engine.refused import Refused

PACKED = "compressed-tensors"
FP8 = "fp8"
_FORMAT = "pack-quantized"
_BLOCK = [128, 128]


@dataclass(frozen=True)
class _Group:
    scheme: Scheme
    targets: tuple[str, ...]


class QuantizationConfig:
    """`quantization_config`. Two kinds are served: compressed-tensors' packed integers, and fp8 experts."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """From a config.json, whose `quantization_config` is an object or absent. Raises Refused."""
        given = config.get("quantization_config") or {}
        self.method = str(given.get("quant_method") or "")
        if self.method not in ("", PACKED, FP8):
            raise Refused(
                f"config.json: quant_method {self.method!r} is not served; use one in bf16, {FP8} or {PACKED}"
            )
        self._groups: tuple[_Group, ...] = ()
        self._ignored: tuple[str, ...] = ()
        if self.method == PACKED:
            self._groups = tuple(_groups(given))
            self._ignored = tuple(str(name) for name in given.get("ignore") or ())
        elif self.method == FP8 and given.get("weight_block_size", _BLOCK) != _BLOCK:
            block = given["weight_block_size"]
            raise Refused(f"config.json: weight_block_size {block} is not served; it must be {_BLOCK}")

    def named(self, module: str) -> tuple[Scheme, ...]:
        """Schemes of the groups whose targets name this module, by its name in the checkpoint."""
        if any(_matches(name, module) for name in self._ignored):
            return ()
        return tuple(
            group.scheme for group in self._groups if any(_matches(name, module) for name in group.targets)
        )

    def allowed(self, module: str) -> tuple[Scheme, ...]:
        """Those that `module` may be packed with: groups that name it, else groups of a class of modules."""
        if any(_matches(name, module) for name in self._ignored):
            return ()
        by_class = (group.scheme for group in self._groups if any(map(_is_class, group.targets)))
        return self.named(module) or tuple(by_class)


def _groups(given: Mapping[str, Any]) -> list[_Group]:
    groups = given.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise Refused(
            "config.json: quantization_config has no config_groups; what is packed how is not known"
        )
    return [_group(name, group, given.get("format")) for name, group in groups.items()]


def _group(name: str, group: Any, default_format: Any) -> _Group:
    where = f"config.json: config_groups.{name}"
    if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
        raise Refused(f"{where} has no weights")
    form = group.get("format") or default_format
    if form != _FORMAT:
        raise Refused(f"{where}: format {form!r} is not served; it must be {_FORMAT!r}")
    if group.get("input_activations") is not None:
        raise Refused(f"{where}: quantized activations are not served")
    targets = group.get("targets")
    if not isinstance(targets, Sequence) or isinstance(targets, str):
        raise Refused(f"{where} has no list of targets")
    for target in targets:
        _check_pattern(where, str(target))
    return _Group(_scheme(where, group["weights"]), tuple(map(str, targets)))


def _scheme(where: str, weights: Mapping[str, Any]) -> Scheme:
    needed = {"type": "int", "symmetric": True, "strategy": "group"}
    for field, value in needed.items():
        if weights.get(field, value) != value:
            raise Refused(f"{where}: weights.{field} is {weights[field]!r}, served is {value!r}")
    if weights.get("actorder") not in (None, "static", "weight"):
        raise Refused(f"{where}: weights.actorder {weights['actorder']!r} is not served")
    try:
        return Scheme(int(weights["num_bits"]), int(weights["group_size"]))
    except (KeyError, TypeError, ValueError):
        bits, size = weights.get("num_bits"), weights.get("group_size")
        raise Refused(f"{where}: {bits!r} bits in groups of {size!r} are not served") from None


def _check_pattern(where: str, target: str) -> None:
    if target.startswith("re:"):
        try:
            re.compile(target[3:])
        except re.error as error:
            raise Refused(f"{where}: target {target!r} is no regular expression: {error}") from None


def _matches(target: str, module: str) -> bool:
    """As compressed-tensors has it: a regular expression from the start, or the name itself."""
    return re.match(target[3:], module) is not None if target.startswith("re:") else target == module


def _is_class(target: str) -> bool:
    return not target.startswith("re:") and "." not in target and target[:1].isupper()
