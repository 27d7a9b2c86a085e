"""Which modules of a checkpoint are quantized, and how, by its tensors: not by the words of its config.

A module's `weight_packed` [N, words], `weight_scale` [N, groups] and `weight_shape` (N, K) leave nothing
open: a value has 32 * words / K bits and a group K / groups values. What config.json calls the module, by
listed name, regex or class, and in which of the two architectures' names, then does not matter.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ple_inference.checkpoint import CheckpointError
from ple_inference.quantized.scheme import BLOCK_SCALE, PACKED, SCALE, SHAPE, WORD_BITS, words
from ple_inference.vllm_engine.products import siblings
from ple_inference.vllm_engine.tensors import Tensors
from ple_inference.vllm_plugin.override import OverrideError

# All experts of a layer share the scheme of the first, as vLLM asks for it.
_OTHER_EXPERT = re.compile(r"\.experts\.[1-9]\d*\.")
_TABLE = ".ngram_embedding."


@dataclass(frozen=True)
class Scheme:
    """Symmetric integers of `bits` bits; `group_size` neighbours of a row share a scale."""

    bits: int
    group_size: int

    def __str__(self) -> str:
        return f"int{self.bits} in groups of {self.group_size}"


def install() -> None:
    from ple_inference.vllm_plugin.runner import TriplexModelRunner

    TriplexModelRunner.reads_schemes = True


def is_live() -> bool:
    from ple_inference.vllm_plugin.runner import TriplexModelRunner

    return TriplexModelRunner.reads_schemes


def settle(vllm_config: Any) -> None:
    """Make vLLM's quantization config say what the checkpoint's tensors say. Raises OverrideError."""
    from vllm.utils.import_utils import has_humming

    quant_config = vllm_config.quant_config
    if quant_config is None or quant_config.get_name() not in ("compressed-tensors", "fp8"):
        return
    model_config = vllm_config.model_config
    try:
        tensors = Tensors.of(Path(model_config.model))
    except CheckpointError as error:
        raise OverrideError(f"triplex: checkpoint_schemes: {error}") from error
    mapped = _names_in_vllm(model_config)
    if quant_config.get_name() == "fp8":
        quant_config.ignored_layers = [mapped(module) for module in plain_modules(tensors)]
        return
    refuse_parts(tensors)
    if schemes := packed_schemes(tensors):
        refuse_mixed(schemes, tensors)
        refuse_without_humming(schemes, has_humming)
        quant_config.target_scheme_map = {
            mapped(module): _as_compressed_tensors(scheme) for module, scheme in schemes.items()
        }
        quant_config.ignore = []


def packed_schemes(tensors: Tensors) -> dict[str, Scheme]:
    """Module -> scheme, for every module with packed weights but the experts after a layer's first.

    Raises OverrideError for shapes that no scheme has.
    """
    modules = (name.removesuffix(PACKED) for name in tensors if name.endswith(PACKED))
    return {module: _scheme(module, tensors) for module in modules if not _OTHER_EXPERT.search(f"{module}.")}


def plain_modules(tensors: Tensors) -> list[str]:
    """Modules of an FP8 checkpoint whose weights are not FP8: they stay as they are stored.

    Raises OverrideError for an FP8 weight without its block scales. The table's one scale is the daemon's.
    """
    plain = []
    for name in tensors:
        module = name.removesuffix(".weight")
        if module == name or _TABLE in name:
            continue
        if tensors[name].dtype != "F8_E4M3":
            plain.append(module)
        elif module + BLOCK_SCALE not in tensors:
            raise _lacks(name, BLOCK_SCALE)
    return plain


def refuse_parts(tensors: Iterable[str]) -> None:
    """One line for packed weights without scale or shape, or the other way round; for every expert."""
    names = {name for name in tensors if _TABLE not in name}
    kinds = (PACKED, SCALE, SHAPE)
    for kind in kinds:
        for module in (name.removesuffix(kind) for name in names if name.endswith(kind)):
            for other in kinds:
                if module + other not in names:
                    raise _lacks(module + kind, other)


def refuse_mixed(schemes: Mapping[str, Scheme], tensors: Container[str]) -> None:
    """One line for weights that must be stored alike and are not."""
    for module, scheme in schemes.items():
        for sibling in siblings(module):
            stored = sibling + PACKED in tensors or f"{sibling}.weight" in tensors
            if stored and schemes.get(sibling) != scheme:
                raise OverrideError(
                    f"triplex: checkpoint_schemes: {module} is {scheme} and {sibling} is "
                    f"{schemes.get(sibling, 'not packed')}: vLLM computes both in one product, so "
                    "store them alike"
                )


def refuse_without_humming(schemes: Mapping[str, Scheme], has_humming: Callable[[], bool]) -> None:
    """One line where the only kernels for 6 bits are missing. Asked if needed: the answer is an import."""
    six = next((module for module, scheme in schemes.items() if scheme.bits == 6), None)
    if six is not None and not has_humming():
        raise OverrideError(
            f"triplex: checkpoint_schemes: {six} has 6-bit weights, whose kernels are in humming-kernels, "
            "which cannot be imported: pip install 'humming-kernels[cu13]==0.1.19'"
        )


def _scheme(module: str, tensors: Tensors) -> Scheme:
    for suffix in (".weight_zero_point", ".weight_g_idx"):
        if module + suffix in tensors:
            raise OverrideError(
                f"triplex: checkpoint_schemes: {module}{suffix}: only symmetric weights in their own order "
                "are served"
            )
    shape, packed, scale = (tensors[module + suffix].shape for suffix in (SHAPE, PACKED, SCALE))
    rows, columns = tensors.int64(module + SHAPE) if shape == (2,) else (0, 0)
    if {len(packed), len(scale)} != {2} or not 0 < scale[1] <= columns or not packed[1]:
        raise OverrideError(
            f"triplex: checkpoint_schemes: {module} of {rows} x {columns} has packed weights {list(packed)} "
            f"and scales {list(scale)}: fetch the checkpoint again, or convert it anew"
        )
    bits = WORD_BITS * packed[-1] // columns
    group_size = columns // scale[-1]
    if packed != (rows, words(columns, bits)) or scale != (rows, columns // group_size):
        raise OverrideError(
            f"triplex: checkpoint_schemes: {module} of {rows} x {columns} has packed weights {list(packed)} "
            f"and scales {list(scale)}, which are of no dense scheme: convert the checkpoint anew"
        )
    return Scheme(bits, group_size)


def _lacks(name: str, suffix: str) -> OverrideError:
    return OverrideError(
        f"triplex: checkpoint_schemes: the checkpoint has {name} and no {suffix} of it: "
        "fetch it again, or convert it anew"
    )


def _names_in_vllm(model_config: Any) -> Callable[[str], str]:
    """From a module's name in the checkpoint to its name in vLLM, which the two architectures give it."""
    from vllm.model_executor.model_loader.utils import get_model_cls

    mapper = get_model_cls(model_config).hf_to_vllm_mapper.get_rename_mapper()
    return lambda module: str(mapper.map_name(f"{module}.weight")).removesuffix(".weight")


def _as_compressed_tensors(scheme: Scheme) -> dict[str, Any]:
    from compressed_tensors.quantization import QuantizationArgs

    weights = QuantizationArgs(
        num_bits=scheme.bits, type="int", symmetric=True, strategy="group", group_size=scheme.group_size
    )
    return {"weights": weights, "input_activations": None, "format": "pack-quantized"}
