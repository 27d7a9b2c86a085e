"""The modules that vLLM makes of a checkpoint's tensors on each rank: what it merges, pads and converts.

Sources, in vLLM 0.33.0: models/qwen4_exp/nvidia/{model,hyperconnection,qsa,ple_layer}.py,
models/qwen3_next.py, layers/mamba/gdn/qwen_gdn_linear_attn.py, layers/quantization.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod

from ple_inference.vllm_engine.linear_shapes import LinearShapes
from ple_inference.vllm_engine.pipeline import Pipeline
from ple_inference.vllm_engine.products import PRODUCT_OF
from ple_inference.vllm_engine.tensors import Tensor, Tensors

TABLE = ".ple_embedding.ngram_embedding."
VISION, DRAFT = "model.visual.", "mtp."
ROOT, ROOT_OF_TEXT = "model.language_model.", "model."
"""Of the decoder, in the two architectures."""
_LAYER = re.compile(r"layers\.(\d+)\.")
_EXPERT = re.compile(r"mlp\.experts\.\d+\.(gate|up|down)_proj$")
_MIXER = re.compile(r"(.*hyper_connection)\.(input_mix_weight_down|block_inject_weight)$")
# As they are made, and so as they are repacked: first those of the whole model, then those of a layer.
_ORDER = ("visual", "embed_tokens", "layers", "hyper_connection_mixer", "lm_head")
_MIXER_PARTS = (
    "hc_norm",
    "input_mix_weight_down",
    "input_mix_weight_down_block_inject",
    "input_mix_weight_up",
    "block_inject_weight",
)
_LAYER_ORDER = (
    *("ple.ple_embedding", "ple.kv_proj", "ple.norm_key", "ple.norm_query", "ple.norm_conv", "ple.conv1d"),
    *("linear_attn.conv1d", "linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba", "linear_attn"),
    *("linear_attn.norm", "linear_attn.out_proj"),
    *("self_attn.qkv_proj", "self_attn.o_proj", "self_attn.q_norm", "self_attn.k_norm"),
    *("self_attn.indexer.index_qk_proj", "self_attn.indexer.q_layernorm", "self_attn.indexer.k_layernorm"),
    *("mlp.gate", "mlp.shared_expert_gate", "mlp.shared_expert.gate_up_proj", "mlp.shared_expert.down_proj"),
    "mlp.experts",
    *(f"{kind}_hyper_connection.{part}" for kind in ("attn", "mlp") for part in _MIXER_PARTS),
)
# A hyper-connection's down projection and injection are padded to a multiple of these rows, in one matrix or
# (vllm_plugin/gated_residual.py, where they are packed) the injection alone.
_MIXER_ROWS = 16
_WEIGHT_SHAPE_BYTES = 16


class Method(Enum):
    """What becomes of a module's weights after they are loaded."""

    PLAIN = "plain"
    MARLIN = "marlin"
    HUMMING = "humming"
    MARLIN_EXPERTS = "marlin experts"
    FP8_MARLIN_EXPERTS = "fp8 marlin experts"


@dataclass(frozen=True)
class Module:
    """One module of one rank. `params`: its parameters in order, name -> bytes as allocated to be loaded."""

    name: str
    method: Method
    params: Mapping[str, int]
    values: int = 0
    """Weights, counted before packing; 0 where nothing depends on it."""
    experts: int = 0

    @property
    def size_bytes(self) -> int:
        return sum(self.params.values())

    @property
    def kept_bytes(self) -> int:
        """Of the parameters once they are repacked."""
        if self.method is Method.FP8_MARLIN_EXPERTS:
            scales = [name for name in self.params if name.endswith("_scale_inv")]
            return self.size_bytes + sum(self.group_scale_bytes(name) - self.params[name] for name in scales)
        return self.size_bytes

    def group_scale_bytes(self, name: str) -> int:
        """Of bf16 scales of rows of 128 columns, made of f32 scales of blocks of 128 x 128."""
        return self.params[name] // 4 * 128 * 2

    @property
    def part(self) -> str:
        """Which line of a report it belongs to."""
        return part_of(self.name)


def part_of(name: str) -> str:
    if name.startswith("visual"):
        return "vision"
    if name in ("embed_tokens", "lm_head"):
        return name
    if "hyper_connection" in name:
        return "hyper-connections"
    inner = _LAYER.sub("", name)
    if inner.startswith("mlp.experts"):
        return "routed experts"
    if inner.startswith("mlp.shared_expert."):
        return "shared experts"
    return {"ple": "PLE", "linear_attn": "GDN", "self_attn": "QSA", "mlp": "routers"}.get(
        inner.partition(".")[0], "other"
    )


def text_name(name: str) -> str:
    """The name without the decoder's prefix, which depends on the architecture: layers.0.mlp.gate.weight."""
    if name.startswith(VISION):
        return name.removeprefix("model.")
    for root in (ROOT, ROOT_OF_TEXT):
        if name.startswith(root):
            return name[len(root) :]
    return name


def stages_of(name: str, pipeline: Pipeline, *, placed: bool) -> Sequence[int]:
    """The ranks that hold a tensor, by its name without prefix."""
    layer = _LAYER.match(name)
    if layer:
        return (pipeline.stage_of(int(layer[1])),)
    if not placed and name.startswith(("embed_tokens.", "lm_head.")):
        return range(pipeline.stages)
    return (0 if name.startswith(("visual.", "embed_tokens.")) else pipeline.stages - 1,)


def rank_modules(
    tensors: Tensors, shapes: LinearShapes, pipeline: Pipeline, *, placed: bool = True, vision: bool = True
) -> list[list[Module]]:
    """For each rank its modules, as vLLM makes them. Neither the table nor the draft layer (MTP) is there.

    `placed`: embedding and output head only where they are used, as the override `placement` has it.
    `vision`: with the tower, which vLLM leaves out where a request may have no images.
    """
    gathered: list[dict[str, dict[str, list[tuple[str, Tensor]]]]] = [{} for _ in range(pipeline.stages)]
    fused_mixers = {name for name in map(text_name, tensors) if name.endswith("input_mix_weight_down.weight")}
    joined = _joined_indexers(tensors)
    for name, tensor in tensors.items():
        if TABLE in name or name.startswith(DRAFT) or (name.startswith(VISION) and not vision):
            continue
        short = text_name(name)
        module, param = _place(short, fused_mixers, joined)
        for stage in stages_of(short, pipeline, placed=placed):
            gathered[stage].setdefault(module, {}).setdefault(param, []).append((short, tensor))
    return [
        [
            _module(name, params, shapes)
            for name, params in sorted(rank.items(), key=lambda item: _order(item[0]))
        ]
        for rank in gathered
    ]


def _place(name: str, fused_mixers: set[str], joined: set[str]) -> tuple[str, str]:
    """Module and parameter that a tensor is loaded into."""
    path, _, param = name.rpartition(".")
    layer = _LAYER.match(path)
    head, inner = (layer[0], path[layer.end() :]) if layer else ("", path)
    if expert := _EXPERT.match(inner):
        return f"{head}mlp.experts", f"{'w2' if expert[1] == 'down' else 'w13'}_{param}"
    if inner == "mlp.experts":  # all experts in one tensor
        return f"{head}mlp.experts", f"{'w2' if param == 'down_proj' else 'w13'}_weight"
    if (mixer := _MIXER.match(path)) and f"{mixer[1]}.input_mix_weight_down.weight" in fused_mixers:
        return f"{mixer[1]}.input_mix_weight_down_block_inject", param
    if inner == "self_attn.indexer.index_qk_proj" and head in joined:
        return f"{head}self_attn.qkv_proj", param
    return head + PRODUCT_OF.get(inner, inner), param


def _joined_indexers(tensors: Tensors) -> set[str]:
    """Layers whose indexer projection is one with q, k and v: those where all are in the same form."""
    joined = set()
    for name, tensor in tensors.items():
        if ".self_attn.q_proj.weight" not in name or name.endswith(("_scale", "_shape")):
            continue
        indexer = tensors.get(name.replace("q_proj", "indexer.index_qk_proj"))
        layer = _LAYER.match(text_name(name))
        if layer and indexer is not None and indexer.shape[1:] == tensor.shape[1:]:
            joined.add(layer[0])
    return joined


def _module(name: str, params: Mapping[str, list[tuple[str, Tensor]]], shapes: LinearShapes) -> Module:
    sizes = {param: _param_bytes(name, param, parts, shapes.experts) for param, parts in params.items()}
    packed = params.get("weight_packed")
    if name.endswith("mlp.experts"):
        methods = {
            "w13_weight_packed": Method.MARLIN_EXPERTS,
            "w13_weight_scale_inv": Method.FP8_MARLIN_EXPERTS,
        }
        method = next((method for param, method in methods.items() if param in sizes), Method.PLAIN)
        return Module(name, method, sizes, experts=shapes.experts)
    if packed is None or name == "embed_tokens":
        return Module(name, Method.PLAIN, sizes)
    part, tensor = packed[0]
    _, columns = shapes.of(part.removesuffix(".weight_packed")) or (0, 0)
    rows = sum(tensor.shape[0] for _, tensor in packed)
    six = tensor.shape[-1] * 32 == columns * 6
    return Module(name, Method.HUMMING if six else Method.MARLIN, sizes, rows * columns)


def _param_bytes(module: str, param: str, parts: list[tuple[str, Tensor]], experts: int) -> int:
    """As vLLM allocates the parameter: merged, padded, in its own dtype."""
    elements = sum(prod(tensor.shape) for _, tensor in parts)
    if param.endswith("weight_shape"):
        # Of experts: two numbers each of the model's dtype, although the checkpoint has int64.
        return experts * 4 if param.startswith("w") and "_weight" in param else _WEIGHT_SHAPE_BYTES
    if param.endswith(("weight_packed", "_offsets", "_sizes", "_multipliers")):
        return sum(tensor.size_bytes for _, tensor in parts)
    if parts[0][1].dtype.startswith("F8"):
        return elements
    if param == "A_log" or param.endswith("weight_scale_inv"):
        return elements * 4
    if module.endswith(("block_inject_weight", "_down_block_inject")):
        rows = sum(tensor.shape[0] for _, tensor in parts)
        return -(-rows // _MIXER_ROWS) * _MIXER_ROWS * parts[0][1].shape[1] * 2
    return elements * 2


def _order(name: str) -> tuple[int, int, int, str]:
    layer = _LAYER.match(name)
    if layer:
        inner = name[layer.end() :]
        starts = [start for start in _LAYER_ORDER if inner == start or inner.startswith(f"{start}.")]
        place = _LAYER_ORDER.index(max(starts, key=len)) if starts else len(_LAYER_ORDER)
        return _ORDER.index("layers"), int(layer[1]), place, name
    top = name.partition(".")[0]
    return _ORDER.index(top) if top in _ORDER else len(_ORDER), 0, 0, name
