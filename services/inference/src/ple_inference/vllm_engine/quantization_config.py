"""What a config.json says of quantized weights."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ple_inference.quantized.scheme import Scheme
from ple_inference.vllm_engine.match_time import MatchTime, MatchTimeout
from ple_inference.vllm_engine.refused import Refused

PACKED = "compressed-tensors"
FP8 = "fp8"
_FORMAT = "pack-quantized"
_BLOCK = [128, 128]
# Some thousand modules by a few patterns take a hundredth of it.
_MATCH_LIMIT_S = 5.0


class _Targets:
    """Modules as compressed-tensors names them: by a regular expression from the start, or as they are."""

    def __init__(self, where: str, given: Any, time: MatchTime) -> None:
        """Raises Refused."""
        self._where, self._time = where, time
        _check_names(where, given)
        self._names = frozenset(name for name in given if not name.startswith("re:"))
        # Compiled here: re keeps only some hundreds, and each is asked of thousands of modules.
        self._patterns = [_pattern(where, name) for name in given if name.startswith("re:")]
        self.has_class = any("." not in name and name[:1].isupper() for name in self._names)

    def name(self, module: str) -> bool:
        """Whether one of them is this module's."""
        if module in self._names or not self._patterns:
            return module in self._names
        pattern = None
        try:
            with self._time.spent():
                for pattern in self._patterns:
                    if pattern.match(module):
                        return True
        except MatchTimeout:
            shown = f"'re:{pattern.pattern}'" if pattern else "the patterns"
            raise Refused(
                f"{self._where}: {shown} took too long to match {module}; write it without nested repeats"
            ) from None
        return False


@dataclass(frozen=True)
class _Group:
    scheme: Scheme
    targets: _Targets


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
        time = MatchTime(_MATCH_LIMIT_S)
        self._groups: tuple[_Group, ...] = ()
        self._ignored = _Targets("", [], time)
        if self.method == PACKED:
            self._groups = tuple(_groups(given, time))
            self._ignored = _Targets(
                "config.json: quantization_config.ignore", given.get("ignore") or [], time
            )
        elif self.method == FP8:
            _check_fp8(given)

    def named(self, module: str) -> tuple[Scheme, ...]:
        """Schemes of the groups whose targets name this module, by its name in the checkpoint."""
        if self._ignored.name(module):
            return ()
        return _schemes(group for group in self._groups if group.targets.name(module))

    def allowed(self, module: str) -> tuple[Scheme, ...]:
        """Those that `module` may be packed with: groups that name it, else groups of a class of modules."""
        if self._ignored.name(module):
            return ()
        return self.named(module) or _schemes(group for group in self._groups if group.targets.has_class)


def _check_fp8(given: Mapping[str, Any]) -> None:
    """Raises Refused."""
    for field, served in (("weight_block_size", _BLOCK), ("activation_scheme", "dynamic")):
        if given.get(field) != served:
            raise Refused(f"config.json: {field} {given.get(field)!r} is not served; it must be {served!r}")
    if given.get("fmt", "e4m3") != "e4m3":
        raise Refused(f"config.json: fmt {given['fmt']!r} is not served; it must be 'e4m3'")
    # What is converted is read from the tensors.
    _check_names("config.json: modules_to_not_convert", given.get("modules_to_not_convert") or [])


def _schemes(groups: Iterable[_Group]) -> tuple[Scheme, ...]:
    return tuple(group.scheme for group in groups)


def _groups(given: Mapping[str, Any], time: MatchTime) -> list[_Group]:
    groups = given.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise Refused(
            "config.json: quantization_config has no config_groups; what is packed how is not known"
        )
    return [_group(name, group, given.get("format"), time) for name, group in groups.items()]


def _group(name: str, group: Any, default_format: Any, time: MatchTime) -> _Group:
    where = f"config.json: config_groups.{name}"
    if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
        raise Refused(f"{where} has no weights")
    form = group.get("format") or default_format
    if form != _FORMAT:
        raise Refused(f"{where}: format {form!r} is not served; it must be {_FORMAT!r}")
    if group.get("input_activations") is not None:
        raise Refused(f"{where}: quantized activations are not served")
    targets = _Targets(f"{where}.targets", group.get("targets"), time)
    return _Group(_scheme(where, group["weights"]), targets)


def _scheme(where: str, weights: Mapping[str, Any]) -> Scheme:
    needed = {"type": "int", "symmetric": True, "strategy": "group"}
    for field, value in needed.items():
        if weights.get(field, value) != value:
            raise Refused(f"{where}: weights.{field} is {weights[field]!r}, served is {value!r}")
    if weights.get("actorder") not in (None, "static", "weight"):
        raise Refused(f"{where}: weights.actorder {weights['actorder']!r} is not served")
    bits, size = weights.get("num_bits"), weights.get("group_size")
    if type(bits) is int and type(size) is int:
        with suppress(ValueError):
            return Scheme(bits, size)
    raise Refused(f"{where}: {bits!r} bits in groups of {size!r} are not served")


def _check_names(where: str, given: Any) -> None:
    if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
        raise Refused(f"{where} is no list of names")


def _pattern(where: str, name: str) -> re.Pattern[str]:
    try:
        return re.compile(name.removeprefix("re:"))
    except (re.error, OverflowError, RecursionError) as error:
        raise Refused(f"{where}: {name!r} is no regular expression: {error}") from None
