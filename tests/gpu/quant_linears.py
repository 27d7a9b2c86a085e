"""One-token products of the released shapes: INT6 by Humming, INT8 by Marlin, BF16; each checked and timed.

Weights are drawn anew for each of enough copies that the GPU's cache holds none of them when its turn comes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ple_inference.quantized.dequantize import dequantize
from ple_inference.quantized.packing import pack
from ple_inference.quantized.scheme import Scheme

SHAPES = {
    "GDN qkvz": (16_384, 2560),
    "GDN out, QSA o": (2560, 6144),
    "QSA qkv": (13_312, 2560),
    "shared gate, up": (1280, 2560),
    "shared down": (2560, 640),
    "HC down": (320, 10_240),
    "HC up": (10_240, 320),
    "PLE key, value": (12_800, 2560),
    "indexer": (640, 2560),
    "head": (248_320, 2560),
}
SCHEMES = (Scheme(6, 64), Scheme(8, 64), Scheme(8, 128))
COLD_BYTES = 256 << 20
ROUNDS = 7
Found = dict[str, Any]


def run(settings: dict[str, Any]) -> Found:
    found: Found = {}
    with _vllm():
        for name in settings.get("shapes", SHAPES):
            rows, columns = SHAPES[name]
            fitting = [scheme for scheme in SCHEMES if columns % scheme.group_size == 0]
            products = {_name(scheme): Packed(rows, columns, scheme) for scheme in fitting}
            timed: dict[str, Callable[[Tensor], Tensor]] = {**products, "bf16": _Plain(rows, columns)}
            found[name] = {
                "kernels": {key: product.kernel for key, product in products.items()},
                "errors": {key: [made.error(tokens) for tokens in (1, 17)] for key, made in products.items()},
                "us": _medians_us(timed, columns),
            }
            torch.cuda.empty_cache()
    return found


def _name(scheme: Scheme) -> str:
    return f"{scheme.bits} bits, groups of {scheme.group_size}"


class Packed:
    """vLLM's own layer of one shape, with the kernel that vLLM chooses for it on this card."""

    def __init__(self, rows: int, columns: int, scheme: Scheme) -> None:
        generator = torch.Generator("cuda").manual_seed(rows + columns + scheme.bits)
        half = 1 << (scheme.bits - 1)
        values = torch.randint(-half, half, (rows, columns), device="cuda", generator=generator)
        scale = torch.rand(rows, columns // scheme.group_size, device="cuda", generator=generator) + 0.5
        scale = (scale / half / columns**0.5).bfloat16()
        packed = pack(values, scheme.bits)
        self._weight = dequantize(packed, scale, scheme, (rows, columns))
        count = max(1, -(-COLD_BYTES // (packed.nbytes + scale.nbytes)))
        self._layers = [_layer(packed, scale, columns, scheme) for _ in range(count)]
        self._turn = 0
        self.kernel = type(self._layers[0].scheme.kernel).__name__

    def error(self, tokens: int) -> float:
        """||out - exact|| / ||exact|| of random activations."""
        x = torch.randn(tokens, self._weight.shape[1], device="cuda").bfloat16()
        exact = x.float() @ self._weight.T
        layer = self._layers[0]
        return float((layer.scheme.apply_weights(layer, x, None).float() - exact).norm() / exact.norm())

    def __call__(self, x: Tensor) -> Tensor:
        self._turn = (self._turn + 1) % len(self._layers)
        layer = self._layers[self._turn]
        return layer.scheme.apply_weights(layer, x, None)  # type: ignore[no-any-return]


class _Plain:
    def __init__(self, rows: int, columns: int) -> None:
        count = max(1, -(-COLD_BYTES // (2 * rows * columns)))
        self._weights = [torch.randn(rows, columns, device="cuda").bfloat16() for _ in range(count)]
        self._turn = 0

    def __call__(self, x: Tensor) -> Tensor:
        self._turn = (self._turn + 1) % len(self._weights)
        return torch.nn.functional.linear(x, self._weights[self._turn])


def _layer(packed: Tensor, scale: Tensor, columns: int, scheme: Scheme) -> Any:
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsWNA16

    layer: Any = torch.nn.Module()
    layer.has_bias = False
    rows = len(packed)
    layer.scheme = CompressedTensorsWNA16("group", scheme.bits, scheme.group_size)
    with torch.device("cuda"):
        layer.scheme.create_weights(
            layer, rows, columns, [rows], columns, torch.bfloat16,
            weight_loader=lambda parameter, value: parameter.data.copy_(value),
        )  # fmt: skip
    layer.weight_packed.data.copy_(packed)
    layer.weight_scale.data.copy_(scale)
    layer.weight_shape.data.copy_(torch.tensor([rows, columns]))
    layer.scheme.process_weights_after_loading(layer)
    return layer


def _medians_us(products: dict[str, Callable[[Tensor], Tensor]], columns: int) -> dict[str, float]:
    """Of a CUDA graph with as many products as make the cache cold, rounds of all by turns; us a product."""
    x = torch.randn(1, columns, device="cuda").bfloat16()
    graphs = {name: _graph(product, x) for name, product in products.items()}
    times: dict[str, list[float]] = {name: [] for name in products}
    for _ in range(ROUNDS):
        for name, (graph, count) in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) * 1e3 / count)
    return {name: statistics.median(values) for name, values in times.items()}


def _graph(product: Callable[[Tensor], Tensor], x: Tensor) -> tuple[torch.cuda.CUDAGraph, int]:
    count = 64
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            product(x)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        for _ in range(count):
            product(x)
    graph.replay()
    torch.cuda.synchronize()
    return graph, count


def _vllm() -> Any:
    """One process that is a whole distributed group, with vLLM's plugins loaded and a config in force."""
    from contextlib import ExitStack

    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    stack = ExitStack()
    stack.enter_context(set_current_vllm_config(VllmConfig()))
    torch.cuda.set_device(0)
    parallel_state.init_distributed_environment(
        world_size=1, rank=0, distributed_init_method="tcp://127.0.0.1:29597", local_rank=0, backend="nccl"
    )
    parallel_state.initialize_model_parallel(1, 1)
    return stack
