"""Refuses a checkpoint whose weights are not all there or cannot be loaded, by its headers alone."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ple_inference.quantized.scheme import BITS, FP8_BLOCK, Scheme, words
from ple_inference.vllm_engine.linear_shapes import RECURRENT, LinearShapes
from ple_inference.vllm_engine.products import PRODUCTS
from ple_inference.vllm_engine.quantization_config import FP8, PACKED, QuantizationConfig
from ple_inference.vllm_engine.refused import Refused
from ple_inference.vllm_engine.stored_names import AGAIN, NUMBERS, OTHER_CONFIG
from ple_inference.vllm_engine.tensors import Tensor, Tensors

_EXPERT = re.compile(r"(layers\.\d+\.mlp\.experts)\.(\d+)\.((?:gate|up|down)_proj)$")
_SCALE_TYPES = ("F16", "BF16")
# vLLM builds these without a quantization; the second kind it does for fp8 only.
_NEVER_QUANTIZED = ("mlp.gate", "mlp.shared_expert_gate", "block_inject_weight")
_NEVER_FP8 = (*_NEVER_QUANTIZED, "embed_tokens", "lm_head", "input_mix_weight_down", "input_mix_weight_up")
_PARAMS = {
    "packed": ("weight_packed", "weight_scale", "weight_shape"),
    "fp8": ("weight", "weight_scale_inv"),
    "plain": ("weight",),
}
_FUSED = ("gate_up_proj", "down_proj")


@dataclass(frozen=True)
class Form:
    """How a matrix is stored: packed by a scheme, fp8, or as it is."""

    kind: str
    scheme: Scheme | None = None

    def __str__(self) -> str:
        return f"{self.scheme.bits} bits in groups of {self.scheme.group_size}" if self.scheme else self.kind


class StoredWeights:
    """The decoder's matrices by module, without the architecture's prefix."""

    def __init__(
        self, tensors: Tensors, names: Mapping[str, str], text: Mapping[str, Any], config: QuantizationConfig
    ) -> None:
        """`names`: of the decoder's tensors, by `decoder_names`."""
        self._shapes, self._config, self._text = LinearShapes(text), config, text
        self._modules: dict[str, dict[str, Tensor]] = {}
        self._names: dict[str, str] = {}
        for short, name in names.items():
            module, _, param = short.rpartition(".")
            self._modules.setdefault(module, {})[param] = tensors[name]
            self._names[module] = name.rpartition(".")[0]
        self._forms: dict[str, Form] = {}

    def check(self) -> None:
        """Raises Refused with one line on the first thing that is wrong."""
        for module, params in self._modules.items():
            if "weight_packed" in params or "weight_scale_inv" in params or self._shapes.of(module):
                self._forms[module] = self._form(module, params)
        self._check_experts()
        self._check_presence()
        self._check_merged()

    def placed(self) -> Iterator[str]:
        """Names without prefix of all tensors that were checked, and nothing else."""
        for module, form in self._forms.items():
            yield from (f"{module}.{param}" for param in _PARAMS[form.kind])
        for layer in range(self._text["num_hidden_layers"]):
            yield from (f"layers.{layer}.mlp.experts.{param}" for param in _FUSED)

    def _form(self, module: str, params: Mapping[str, Tensor]) -> Form:
        name = self._names[module]
        shape = self._shapes.of(module)
        if shape is None:
            raise Refused(
                f"{_file(params)}: {name} is quantized, and it is no matrix of the decoder; {OTHER_CONFIG}"
            )
        if stranger := next(
            (param for param in params if param.startswith(("weight_zero_point", "weight_g_idx"))), ""
        ):
            raise Refused(
                f"{_file(params)}: {name}.{stranger}: only symmetric weights in order are served; "
                "use another checkpoint"
            )
        if "weight_packed" in params:
            return self._packed(module, params, shape)
        if "weight" not in params:
            raise Refused(f"{_file(params)}: {name} has no weight, only {', '.join(sorted(params))}; {AGAIN}")
        weight = params["weight"]
        if weight.shape != shape:
            raise Refused(
                f"{_file(params)}: {name}.weight is {list(weight.shape)}, the config wants {list(shape)}; "
                f"{OTHER_CONFIG}"
            )
        return (
            self._fp8(module, params, shape) if weight.dtype.startswith("F8") else self._plain(name, params)
        )

    def _packed(self, module: str, params: Mapping[str, Tensor], shape: tuple[int, int]) -> Form:
        name = self._names[module]
        if "weight" in params:
            raise Refused(f"{_file(params)}: {name} is there twice, packed and not; {AGAIN}")
        _check_quantizable(module, name, params, _NEVER_QUANTIZED)
        form = Form("packed", _packed_scheme(name, params, shape))
        self._check_declared(module, name, params, form)
        return form

    def _fp8(self, module: str, params: Mapping[str, Tensor], shape: tuple[int, int]) -> Form:
        name, dtype = self._names[module], params["weight"].dtype
        if dtype != "F8_E4M3" or self._config.method != FP8:
            method = self._config.method or "no quantization"
            raise Refused(
                f"{_file(params)}: {name} is {dtype}, config.json says {method}; served are F8_E4M3 weights "
                f"with quant_method {FP8}"
            )
        _check_quantizable(module, name, params, _NEVER_FP8)
        _check_blocks(name, params, shape)
        return Form("fp8")

    def _plain(self, name: str, params: Mapping[str, Tensor]) -> Form:
        dtype = params["weight"].dtype
        if "weight_scale" in params or "weight_scale_inv" in params:
            raise Refused(f"{_file(params)}: {name} has a scale, and its weight is plain {dtype}; {AGAIN}")
        if dtype not in NUMBERS:
            raise Refused(f"{_file(params)}: {name}.weight is {dtype}, not {' or '.join(NUMBERS)}; {AGAIN}")
        if self._config.named(name):
            raise Refused(
                f"{_file(params)}: {name} is plain {dtype}, config.json says that it is packed; "
                f"{OTHER_CONFIG}"
            )
        return Form("plain")

    def _check_declared(self, module: str, name: str, params: Mapping[str, Tensor], form: Form) -> None:
        if self._config.method != PACKED:
            method = self._config.method or "no quantization"
            raise Refused(f"{_file(params)}: {name} is packed, config.json says {method}; {OTHER_CONFIG}")
        expert = _EXPERT.match(module)
        if expert and expert[2] != "0":
            return  # vLLM asks once for all experts of a layer, and they are compared with each other
        allowed = self._config.allowed(name)
        if form.scheme not in allowed:
            said = " or ".join(str(Form("packed", scheme)) for scheme in allowed) or "that it is not"
            raise Refused(
                f"{_file(params)}: {name} is packed with {form}, config.json says {said}; {OTHER_CONFIG}"
            )

    def _check_experts(self) -> None:
        """All of a layer, or one tensor with all of them; gate, up and down in one form."""
        stacks: dict[str, dict[str, Form]] = {}
        for module, form in self._forms.items():
            if expert := _EXPERT.match(module):
                stacks.setdefault(expert[1], {})[f"{expert[2]}.{expert[3]}"] = form
        for layer in range(self._text["num_hidden_layers"]):
            stack = f"layers.{layer}.mlp.experts"
            found = stacks.get(stack, {})
            if not found or stack in self._modules:
                self._check_fused(stack, found)
                continue
            parts = ("gate_proj", "up_proj", "down_proj")
            wanted = (f"{number}.{part}" for number in range(self._shapes.experts) for part in parts)
            missing = next((name for name in wanted if name not in found), None)
            if missing is not None:
                raise Refused(f"{stack}.{missing} is missing of {self._shapes.experts} experts; {AGAIN}")
            self._check_alike(stack, found)

    def _check_fused(self, stack: str, single: Mapping[str, Form]) -> None:
        fused = self._modules.get(stack, {})
        rows, columns = self._shapes.of(f"{stack}.0.down_proj") or (0, 0)
        shapes = ((self._shapes.experts, 2 * columns, rows), (self._shapes.experts, rows, columns))
        for param, shape in zip(_FUSED, shapes, strict=True):
            if param not in fused:
                raise Refused(f"{stack} are missing: neither single experts nor {param}; {AGAIN}")
            tensor = fused[param]
            if tensor.shape != shape or tensor.dtype not in NUMBERS:
                raise Refused(
                    f"{tensor.file.name}: {stack}.{param} is {tensor.dtype} {list(tensor.shape)}, the config "
                    f"wants {list(shape)} in BF16; {OTHER_CONFIG}"
                )
        if single:
            raise Refused(f"{stack} are there twice, in one tensor and one by one; {AGAIN}")
        if self._config.method:
            # vLLM would build them quantized: it looks for the names of single experts.
            raise Refused(
                f"{stack} are in one tensor, config.json says {self._config.method}; {OTHER_CONFIG}"
            )

    def _check_presence(self) -> None:
        missing = next((module for module in self._expected() if module not in self._forms), None)
        if missing is not None:
            raise Refused(f"the checkpoint has no {missing}.weight, packed or not; {AGAIN}")

    def _expected(self) -> Iterator[str]:
        (ple,) = self._text["ple_layer_ids"]
        for layer, kind in enumerate(self._text["layer_types"]):
            yield from self._shapes.modules_of(layer, attention=kind != RECURRENT, ple=layer == ple - 1)
        # Where the config ties them too: vLLM's model makes an output head in any case.
        yield from ("embed_tokens", "lm_head")
        yield from (f"hyper_connection_mixer.input_mix_weight_{way}" for way in ("down", "up"))

    def _check_merged(self) -> None:
        for layer in range(self._text["num_hidden_layers"]):
            for parts in PRODUCTS.values():
                names = [f"layers.{layer}.{part}" for part in parts]
                self._check_alike(
                    f"layers.{layer}", {name: self._forms[name] for name in names if name in self._forms}
                )

    def _check_alike(self, where: str, forms: Mapping[str, Form]) -> None:
        first = next(iter(forms), "")
        other = next((name for name, form in forms.items() if form != forms[first]), None)
        if other is not None:
            raise Refused(
                f"{where}: {first} is stored as {forms[first]} and {other} as {forms[other]}; vLLM makes one "
                "matrix of them, so they must be alike: use another checkpoint"
            )


def _check_quantizable(module: str, name: str, params: Mapping[str, Tensor], never: tuple[str, ...]) -> None:
    if module.endswith(never):
        raise Refused(
            f"{_file(params)}: {name} is quantized, and vLLM computes it in BF16; use another checkpoint"
        )


def _packed_scheme(name: str, params: Mapping[str, Tensor], shape: Sequence[int]) -> Scheme:
    packed = params["weight_packed"]
    rows, columns = shape
    for needed in ("weight_scale", "weight_shape"):
        if needed not in params:
            raise Refused(f"{_file(params)}: {name} has no {needed}; {AGAIN}")
    scale = params["weight_scale"]
    if packed.dtype != "I32" or len(packed.shape) != 2 or packed.shape[0] != rows:
        raise Refused(
            f"{_file(params)}: {name}.weight_packed is {packed.dtype} {list(packed.shape)}, not I32 "
            f"[{rows}, words]; {OTHER_CONFIG}"
        )
    if scale.dtype not in _SCALE_TYPES:
        raise Refused(
            f"{_file(params)}: {name}.weight_scale is {scale.dtype}, not {' or '.join(_SCALE_TYPES)}; {AGAIN}"
        )
    stored = params["weight_shape"]
    if stored.dtype != "I64" or stored.shape != (2,):
        raise Refused(
            f"{_file(params)}: {name}.weight_shape is {stored.dtype} {list(stored.shape)}, not I64 [2]; "
            f"{AGAIN}"
        )
    bits = _bits(name, params, columns)
    groups = scale.shape[1] if len(scale.shape) == 2 and scale.shape[0] == rows else 0
    if not groups or columns % groups:
        raise Refused(
            f"{_file(params)}: {name}.weight_scale is {list(scale.shape)}, which gives {rows} rows of "
            f"{columns} columns no whole groups; {OTHER_CONFIG}"
        )
    return Scheme(bits, columns // groups)


def _bits(name: str, params: Mapping[str, Tensor], columns: int) -> int:
    stored = params["weight_packed"].shape[1]
    for bits in BITS:
        if stored == words(columns, bits):
            return bits
    where = f"{_file(params)}: {name}.weight_packed has {stored} words a row"
    if stored == -(-columns // 5):
        raise Refused(
            f"{where}: 6 bits as 5 values a word, as the library compressed-tensors packs them; vLLM reads a "
            f"dense stream, here {words(columns, 6)} words: pack it anew"
        )
    dense = ", ".join(str(words(columns, bits)) for bits in BITS)
    raise Refused(f"{where}; {columns} columns of 4, 6 or 8 bits have {dense}; {OTHER_CONFIG}")


def _check_blocks(name: str, params: Mapping[str, Tensor], shape: Sequence[int]) -> None:
    scale = params.get("weight_scale_inv")
    if scale is None:
        raise Refused(f"{_file(params)}: {name} is fp8 and has no weight_scale_inv; {AGAIN}")
    expected = tuple(-(-side // FP8_BLOCK) for side in shape)
    if scale.dtype not in ("BF16", "F32") or scale.shape != expected:
        raise Refused(
            f"{_file(params)}: {name}.weight_scale_inv is {scale.dtype} {list(scale.shape)}, not BF16 "
            f"{list(expected)}; {AGAIN}"
        )


def _file(params: Mapping[str, Tensor]) -> str:
    return next(iter(params.values())).file.name
