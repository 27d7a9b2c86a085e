"""Builds and loads vLLM's model from synthetic checkpoints with each override on and off; prints JSON.

Not a test: the environment of tests cannot import vllm. test_quantized.py runs it once and looks at what it
says. Usage: quantized_cases.py FOLDER, which holds the checkpoints that `main` names.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import card
import torch
from safetensors import safe_open
from torch.nn import functional
from vllm.model_executor.models.utils import PPMissingLayer, StageMissingLayer
from vllm.models.qwen4_exp.nvidia import hyperconnection, model

from ple_inference.quantized.dequantize import dequantize
from ple_inference.quantized.scheme import Scheme
from ple_inference.vllm_plugin import (
    checkpoint_schemes,
    complete_load,
    gated_residual,
    split_qsa,
    vocabulary_layers,
)
from ple_inference.vllm_plugin.override import OverrideError

INSTALL: dict[str, Callable[[], None]] = {
    "placement": vocabulary_layers.place,
    "quantized_embeddings": vocabulary_layers.quantize,
    "hyper_connections": gated_residual.install,
    "qsa_projection": split_qsa.install,
    "complete_load": complete_load.install,
}
WHOLE = ("int4", "int4-images", "listed", "fp8", "bare", "bf16")
LAYER = re.compile(r"\.layers\.(\d+)\.")
BOUND = ("VocabParallelEmbedding", "ParallelLMHead", "GatedResidual", "Qwen4ExpQSAAttention")


@contextmanager
def overrides(*off: str) -> Iterator[None]:
    before = {name: getattr(model, name) for name in BOUND}
    loaders = [cls.load_weights for cls in card.MODELS]
    for name, install in INSTALL.items():
        if name not in off:
            install()
            install()
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(model, name, value)
        for cls, loader in zip(card.MODELS, loaders, strict=True):
            cls.load_weights = loader


def made(folder: Path, *off: str, images: int = 1) -> Any:
    config = card.engine_config(str(folder), images)
    if "checkpoint_schemes" not in off:
        checkpoint_schemes.settle(config)
    return card.build(config)


def weights(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name)


def outcome(folder: Path, *off: str) -> str:
    """How building and loading ends: the class of the error and the first line of its text."""
    try:
        with overrides(*off):
            made(folder, *off).load_weights(weights(folder))
    except (ValueError, AssertionError, KeyError, RuntimeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return "loaded"


def schemes(folder: Path, *off: str) -> dict[str, str]:
    """Module -> how vLLM computes it."""
    with overrides(*off):
        modules = made(folder, *off).named_modules()
    return {name: method for name, module in modules if (method := _method(module))}


def _method(module: Any) -> str:
    method = getattr(module, "quant_method", None)
    if method is None:
        return ""
    scheme = getattr(module, "scheme", None)
    if scheme is not None:
        return f"{scheme.num_bits} bits, {scheme.group_size}, {type(scheme.kernel).__name__}"
    backend = getattr(method, "wna16_backend", None) or getattr(method, "fp8_backend", None)
    bits = f"{method.num_bits} bits, {method.group_size}, " if hasattr(method, "num_bits") else ""
    return bits + (backend.name if backend is not None else type(method).__name__)


def ranks(folder: Path, stages: int, images: int = 1) -> list[dict[str, Any]]:
    """What each rank holds, and which of its parameters the checkpoint did not bring."""
    found = []
    for rank in range(stages):
        with overrides(), card.pipeline(rank, stages):
            built = made(folder, images=images)
            loaded = built.load_weights(weights(folder))
        names = {name for name, _ in built.named_parameters()}
        text = getattr(built, "language_model", built)
        parts = {
            "embed_tokens": text.model.embed_tokens,
            "lm_head": text.lm_head,
            "hyper_connection_mixer": text.model.hyper_connection_mixer,
            "visual": getattr(built, "visual", None),
        }
        absent = (PPMissingLayer, StageMissingLayer, type(None))
        found.append(
            {
                "holds": [name for name, part in parts.items() if not isinstance(part, absent)],
                "layers": sorted(
                    {int(name.split("layers.")[1].split(".")[0]) for name in names if "layers." in name}
                ),
                "parameters": len(names),
                "not loaded": sorted(names - loaded),
            }
        )
    return found


def residual(folder: Path) -> dict[str, tuple[float, float]]:
    """The largest difference of a packed residual from its formula over decoded weights, on the CPU.

    And, second, from the formula over another residual's weights.
    """
    stored = dict(weights(folder))
    with overrides():
        built = made(folder)
        built.load_weights(weights(folder))
    found = {}
    with _on_the_cpu():
        for name in ("model.layers.2.mlp_hyper_connection", "model.hyper_connection_mixer"):
            module, other = built.get_submodule(name), "model.layers.3.attn_hyper_connection"
            found[name] = _difference(module, name, stored), _difference(module, other, stored)
    return found


@contextmanager
def _on_the_cpu() -> Iterator[None]:
    """Upstream's Triton kernels by their formulas, in f32."""
    before = {module: module.hc_silu for module in (gated_residual, hyperconnection)}
    for module in before:
        module.hc_silu = lambda low, streams: functional.silu(low.float() / streams).to(low.dtype)
    try:
        yield
    finally:
        for module, kernel in before.items():
            module.hc_silu = kernel


def _difference(residual: Any, name: str, stored: dict[str, torch.Tensor]) -> float:
    """Of `_down_and_inject` and the up projection: what the override makes itself."""
    scheme = Scheme(8, 64)

    def decoded(projection: str) -> torch.Tensor:
        at = f"{name}.{projection}"
        rows, columns = stored[f"{at}.weight_shape"].tolist()
        packed, scale = stored[f"{at}.weight_packed"], stored[f"{at}.weight_scale"]
        return dequantize(packed, scale.bfloat16(), scheme, (rows, columns))

    def apply(layer: Any, x: torch.Tensor, bias: None = None) -> torch.Tensor:
        shape = (layer.output_size, layer.input_size)
        weight = dequantize(layer.weight_packed.data, layer.weight_scale.data, scheme, shape)
        return (x.float() @ weight.T).to(x.dtype)

    for projection in (residual.input_mix_weight_down, residual.input_mix_weight_up):
        projection.quant_method.apply = apply
    x = torch.randn(3, residual.hyper_hidden_size, generator=torch.Generator().manual_seed(0)).bfloat16()
    low, injection = residual._down_and_inject(x)
    gate = residual.input_mix_weight_up(low)
    expected_low = functional.silu(x.float() @ decoded("input_mix_weight_down").T / residual.hc_count)
    expected_gate = low.float() @ decoded("input_mix_weight_up").T
    differences = [(low - expected_low).abs().max(), (gate - expected_gate).abs().max()]
    if residual.use_combine:
        inject = stored[f"{name}.block_inject_weight.weight"].float()
        assert injection.shape == (3, residual.hc_count)
        differences.append((injection.float() - x.float() @ inject.T).abs().max())
    return max(float(difference) for difference in differences)


def refused(folder: Path) -> str:
    try:
        made(folder)
    except OverrideError as error:
        return str(error)
    return ""


def main() -> None:
    root = Path(sys.argv[1])
    card.start(card.engine_config(str(root / "int4")))
    found: dict[str, Any] = {
        "schemes": {name: schemes(root / name) for name in WHOLE},
        "ranks": {
            f"{name}, {stages}": ranks(root / name, stages)
            for name in ("int4", "int4-images", "fp8", "fp8-images")
            for stages in (1, 2, 3)
        },
        "no images": ranks(root / "int4-images", 2, images=0),
        "off": {name: outcome(root / "int4-images", name) for name in (*INSTALL, "checkpoint_schemes")},
        "listed, off": outcome(root / "listed", "checkpoint_schemes"),
        "bare, off": outcome(root / "bare", "checkpoint_schemes", "complete_load"),
        "bare, off, checked": outcome(root / "bare", "checkpoint_schemes"),
        "lacks, unread": {
            path.name: outcome(path, "checkpoint_schemes") for path in sorted(root.glob("lacks-*"))
        },
        "lacks": {path.name: outcome(path) for path in sorted(root.glob("lacks-*"))},
        "lacks, off": {
            path.name: outcome(path, "complete_load", "checkpoint_schemes")
            for path in sorted(root.glob("lacks-*"))
        },
        "residual": residual(root / "int4"),
        "mixed": refused(root / "mixed"),
    }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
