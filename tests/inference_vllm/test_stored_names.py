"""Tensors without a place, and places without a tensor: refused by the headers, of both quantized layouts."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import pytest
from refused_case import EXPERT, EXPERTS, FILE, QKV, TEXT, Case, Shapes

BOTH = pytest.mark.parametrize("form", ["int4-mixed", "fp8"])
NORM = f"{TEXT}layers.3.self_attn.q_norm.weight"
TABLE = f"{TEXT}layers.1.ple.ple_embedding.ngram_embedding"
VISION = "model.visual.blocks.5.attn.qkv.weight"
Change = Callable[[Shapes], object]


def gone(name: str) -> Change:
    return lambda shapes: shapes.pop(name)


def put(name: str, dtype: str, *shape: int) -> Change:
    return lambda shapes: shapes.update({name: (dtype, list(shape))})


@BOTH
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        # What the model of the config has no place for.
        (
            put(f"{TEXT}layers.57.mlp.gate.weight", "BF16", EXPERTS, 2560),
            f"{TEXT}layers.57.mlp.gate.weight, and config.json says that num_hidden_layers is 4; take the",
        ),
        (
            put(f"{TEXT}layers.57.attn_hyper_connection.hc_norm.weight", "BF16", 10_240),
            "num_hidden_layers is 4",
        ),
        (
            put(f"{TEXT}layers.2.mlp.experts.{EXPERTS}.up_proj.weight", "BF16", 640, 2560),
            f"num_experts is {EXPERTS}",
        ),
        *(
            (put(f"{TEXT}layers.{number}.mlp.gate.weight", "BF16", EXPERTS, 2560), "num_hidden_layers is 4")
            for number in ("4", "03", "9999999999", "9" * 5000)
        ),
        (put(f"{TEXT}layers.0.mlp.other.weight", "BF16", 1), f"has no place for {TEXT}layers.0.mlp.other"),
        (put(f"{QKV}.bias", "BF16", 12_288), f"has no place for {QKV}.bias"),
        (put(f"{QKV}.weight_global_scale", "F32", 1), f"has no place for {QKV}.weight_global_scale"),
        (put(f"{TEXT}layers.0.self_attn.q_norm.weight", "BF16", 256), "has no place for"),
        (put("model.visual.blocks.5.attn.extra", "BF16", 1), "has no place for model.visual.blocks.5.attn"),
        (put("model.layers.0.mlp.gate.weight", "BF16", EXPERTS, 2560), "is no tensor of this architecture"),
        (put("other.weight", "BF16", 1), "other.weight is no tensor of this architecture"),
        (put(f"{TABLE}.shard_128.weight", "BF16", 1, 160), "shard_128.weight is beyond the 128 shards"),
        (put(f"{TABLE}.scales", "BF16", 1), "ngram_embedding.scales is no part of a table"),
        # Places without a tensor.
        (gone(NORM), "the checkpoint has no layers.3.self_attn.q_norm.weight; download it again"),
        (gone(f"{TEXT}layers.0.linear_attn.A_log"), "has no layers.0.linear_attn.A_log"),
        (gone(f"{TEXT}layers.2.mlp_hyper_connection.hc_norm.weight"), "has no layers.2.mlp_hyper_connection"),
        (gone(f"{TEXT}hyper_connection_mixer.hc_norm.weight"), "has no hyper_connection_mixer.hc_norm"),
        (gone(f"{TEXT}layers.1.ple.conv1d.weight"), "has no layers.1.ple.conv1d.weight"),
        (gone(f"{TEXT}layers.1.ple.ple_embedding.layer_multipliers"), "ple_embedding.layer_multipliers"),
        (gone(VISION), f"the checkpoint has no {VISION}"),
        (gone(f"{TABLE}.shard_3.weight"), "the table has no shard_3 of 128"),
        # Of another type or shape.
        (put(NORM, "F8_E4M3", 256), "q_norm.weight is F8_E4M3, not BF16 or F16 or F32"),
        (put(NORM, "I32", 256), "q_norm.weight is I32, not BF16"),
        (put(NORM, "BF16", 255), "q_norm.weight is [255], the config wants [256]"),
        (put(VISION, "F8_E4M3", 3456, 1152), f"{VISION} is F8_E4M3, not BF16"),
        (put(VISION, "BF16", 3456, 1152, 1), f"{VISION} is [3456, 1152, 1], the config wants [any, any]"),
        (put(f"{TEXT}layers.1.ple.ple_embedding.layer_multipliers", "I32", 3), "is I32, not I64"),
        (put(f"{TABLE}.shard_3.weight", "BF16", 2_500_012, 80), "shard_3.weight is BF16 [2500012, 80]"),
        (put(f"{TABLE}.shard_3.weight", "I8", 2_500_012, 160), "shard_3.weight is I8 [2500012, 160]"),
        # Named twice.
        (
            put(f"{TEXT}layers.2.mlp.experts.gate_up_proj", "BF16", EXPERTS, 1280, 2560),
            "neither single experts",
        ),
        (
            lambda shapes: (
                put(f"{TEXT}layers.2.mlp.experts.gate_up_proj", "BF16", EXPERTS, 1280, 2560)(shapes),
                put(f"{TEXT}layers.2.mlp.experts.down_proj", "BF16", EXPERTS, 2560, 640)(shapes),
            ),
            "layers.2.mlp.experts are there twice, in one tensor and one by one",
        ),
        (
            lambda shapes: (
                [
                    shapes.pop(name)
                    for name in list(shapes)
                    if name.startswith(f"{TEXT}layers.2.mlp.experts.")
                ],
                put(f"{TEXT}layers.2.mlp.experts.gate_up_proj", "BF16", EXPERTS, 1280, 2560)(shapes),
                put(f"{TEXT}layers.2.mlp.experts.down_proj", "BF16", EXPERTS, 2560, 640)(shapes),
            ),
            "layers.2.mlp.experts are in one tensor, config.json says ",
        ),
    ],
)
def test_names_of_another_model(case: Case, form: str, change: Change, reason: str) -> None:
    case.write(form, change)
    assert reason in case.refusal()


@BOTH
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (
            {"num_experts": 6},
            "mlp.gate.weight is [3, 2560], the config wants [6, 2560]; take the config.json of",
        ),
        ({"num_experts": 2, "num_experts_per_tok": 2}, "and config.json says that num_experts is 2"),
        ({"num_experts_per_tok": 4}, "num_experts_per_tok is 4 of 3 experts"),
        ({"num_hidden_layers": 3, "layer_types": ["linear_attention"] * 3}, "num_hidden_layers is 3"),
        ({"layer_types": ["linear_attention"] * 4}, "has no layers.3.linear_attn.in_proj_qkv"),
        ({"layer_types": ["linear_attention"] * 3 + ["sliding"]}, "layer_types has 'sliding', served are"),
        ({"hc_lowrank": 640}, "input_mix_weight_down"),
        ({"hc_count": 5}, "input_mix_weight_down"),
        ({"vocab_size": 248_319}, "embed_tokens"),
        ({"linear_conv_kernel_dim": 3}, "conv1d.weight is [10240, 1, 4], the config wants [10240, 1, 3]"),
        ({"ple_conv_kernel_size": 5}, "ple.conv1d.weight is [10240, 1, 4], the config wants [10240, 1, 5]"),
        ({"heads_per_ngram": 4}, "shard_0.weight is "),
        ({"ngram_size": 4, "ple_embed_dim": 3840}, "key_proj"),
        ({"split_ngram_parts": 127}, "shard_127.weight is beyond the 127 shards"),
        ({"split_ngram_parts": 129}, "the table has no shard_128 of 129"),
        ({"ple_layer_ids": [3]}, "has no layers.2.ple.key_proj"),
    ],
)
def test_a_config_of_another_model(case: Case, form: str, fields: dict[str, Any], reason: str) -> None:
    case.write(form, config=lambda config: config["text_config"].update(fields))
    assert reason in case.refusal()


@pytest.mark.parametrize(
    ("vision", "reason"),
    [
        ([], "vision_config is no object"),
        ({"depth": 10**12}, "vision_config.depth is 1000000000000, not a number of 1 to 1000"),
        ({"depth": "27"}, "vision_config.depth is '27'"),
        ({"depth": 28}, "the checkpoint has no model.visual.blocks.27."),
        ({"depth": 26}, "has no place for model.visual.blocks.26."),
        (
            {"hidden_size": 1024},
            "patch_embed.proj.weight is [1152, 3, 2, 16, 16], the config wants [1024, any",
        ),
        (
            {"hidden_size": 1152, "out_hidden_size": 3584},
            "linear_fc2.weight is [2560, 4608], the config wants [3584",
        ),
    ],
)
def test_another_vision_tower(case: Case, vision: Any, reason: str) -> None:
    case.write(config=lambda config: config.update(vision_config=vision))
    assert reason in case.refusal()


def test_an_architecture_that_the_config_is_not_of(case: Case) -> None:
    case.write(config=lambda config: config.update(architectures=["Qwen4ExpForCausalLM"]))
    assert "with a text_config it must be Qwen4ExpForConditionalGeneration" in case.refusal()


@pytest.mark.parametrize("part", ["in_proj_a", "in_proj_b"])
def test_both_gates_of_a_recurrent_layer_are_one_product(case: Case, part: str) -> None:
    name = f"{TEXT}layers.0.linear_attn.{part}"

    def pack(shapes: Shapes) -> None:
        del shapes[f"{name}.weight"]
        shapes[f"{name}.weight_packed"] = "I32", [48, 480]
        shapes[f"{name}.weight_scale"] = "F16", [48, 40]
        shapes[f"{name}.weight_shape"] = "I64", [2]

    def say(config: dict[str, Any]) -> None:
        config["quantization_config"]["ignore"].remove(name)
        config["quantization_config"]["config_groups"]["group_1"]["targets"].append(name)

    case.write("int4-mixed", pack, say)
    line = case.refusal()
    assert f"{part} as 6 bits" in line or f"{part} is stored as 6 bits" in line
    assert "vLLM makes one matrix of them" in line


@pytest.mark.parametrize(
    "module", ["layers.0.mlp.gate", "layers.0.attn_hyper_connection.block_inject_weight"]
)
def test_what_vllm_never_computes_quantized(case: Case, module: str) -> None:
    def quantize(shapes: Shapes) -> None:
        rows, columns = shapes[f"{TEXT}{module}.weight"][1]
        shapes[f"{TEXT}{module}.weight"] = "F8_E4M3", [rows, columns]
        shapes[f"{TEXT}{module}.weight_scale_inv"] = "BF16", [1, columns // 128]

    case.write("fp8", quantize)
    assert f"{module} is quantized, and vLLM computes it in BF16" in case.refusal()


@pytest.mark.parametrize(
    ("form", "change", "config", "reason"),
    [
        (
            "int4-mixed",
            lambda shapes: shapes.update({f"{EXPERT}.weight": ("BF16", [640, 2560])}),
            lambda config: None,
            f"{EXPERT} is there twice, packed and not",
        ),
        (
            "int4-mixed",
            lambda shapes: (
                [
                    shapes.pop(f"{TEXT}layers.3.self_attn.o_proj.weight_{part}")
                    for part in ("packed", "scale", "shape")
                ],
                put(f"{TEXT}layers.3.self_attn.o_proj.weight", "F8_E4M3", 2560, 6144)(shapes),
                put(f"{TEXT}layers.3.self_attn.o_proj.weight_scale_inv", "BF16", 20, 48)(shapes),
            ),
            lambda config: None,
            "o_proj is F8_E4M3, config.json says compressed-tensors",
        ),
        (
            "fp8",
            lambda shapes: None,
            lambda config: config.pop("quantization_config"),
            "the table has a weight_scale",
        ),
        (
            "fp8",
            put(f"{EXPERT}.weight", "F8_E5M2", 640, 2560),
            lambda config: None,
            "is F8_E5M2, config.json says fp8",
        ),
        (
            "fp8",
            put(f"{TABLE}.weight_scale", "BF16", 2),
            lambda config: None,
            "weight_scale is BF16 [2], not one",
        ),
        (
            "fp8",
            put(f"{TABLE}.weight_scale", "F16", 1),
            lambda config: None,
            "weight_scale is F16 [1], not one",
        ),
        *(
            (
                "fp8",
                lambda shapes: None,
                lambda config, f=fields: config["quantization_config"].update(f),
                reason,
            )
            for fields, reason in (
                ({"weight_block_size": None}, "weight_block_size None is not served; it must be [128, 128]"),
                (
                    {"activation_scheme": "static"},
                    "activation_scheme 'static' is not served; it must be 'dynamic'",
                ),
                ({"fmt": "e5m2"}, "fmt 'e5m2' is not served"),
                ({"modules_to_not_convert": "lm_head"}, "modules_to_not_convert is no list of names"),
            )
        ),
    ],
)
def test_another_quantization_than_the_config_says(
    case: Case, form: str, change: Change, config: Callable[[dict[str, Any]], object], reason: str
) -> None:
    case.write(form, change, config)
    assert reason in case.refusal()


def test_what_vllm_passes_over_is_passed_over(case: Case) -> None:
    """And the draft module, which no profile runs; a table may be elsewhere altogether."""

    def more(shapes: Shapes) -> None:
        for name in [name for name in shapes if name.startswith((TABLE, "mtp.layers.0.self_attn"))]:
            del shapes[name]
        put(f"{TEXT}layers.3.self_attn.rotary_emb.inv_freq", "F32", 32)(shapes)
        put(f"{TEXT}layers.3.self_attn.k_scale", "F32", 1)(shapes)
        put(f"{TEXT}hyper_connection_mixer.block_inject_weight.weight", "BF16", 4, 10_240)(shapes)

    case.write("int4-mixed", more)
    case.succeed("plan")


# -- files ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", [None, 7, [FILE], "../model/model.safetensors", "model.bin"])
def test_an_index_that_names_no_files_of_the_folder(case: Case, file: object) -> None:
    case.write()
    case.change("model.safetensors.index.json", lambda index: index["weight_map"].update({NORM: file}))
    line = case.refusal()
    assert f"model.safetensors.index.json names {file!r}, which is no .safetensors file of its folder" in line


def test_a_tensor_that_two_files_hold(case: Case) -> None:
    """vLLM loads both, and the last one stays."""
    case.write()
    os.link(case.folder / FILE, case.folder / "zz.safetensors")
    case.change(
        "model.safetensors.index.json", lambda index: index["weight_map"].update({NORM: "zz.safetensors"})
    )
    assert f"is in {FILE} and in zz.safetensors" in case.refusal()


def test_a_tensor_that_the_index_does_not_name(case: Case) -> None:
    """vLLM loads it all the same."""
    case.write()
    case.change("model.safetensors.index.json", lambda index: index["weight_map"].pop(NORM))
    assert f"{FILE} holds {NORM}, which the index does not name" in case.refusal()


@pytest.mark.parametrize("name", [FILE, "config.json", "generation_config.json"])
def test_a_pipe_in_place_of_a_file(case: Case, name: str) -> None:
    """Nobody writes into it: who opens it waits for ever."""
    case.write()
    (case.folder / name).unlink(missing_ok=True)
    os.mkfifo(case.folder / name)
    assert f"{name} is no file" in case.refusal()


def _rewritten(case: Case, change: Callable[[dict[str, Any]], object]) -> None:
    """With another header, and the data where they were."""
    path = case.folder / FILE
    with path.open("rb") as file:
        size_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size_bytes))
    data_bytes = path.stat().st_size - 8 - size_bytes
    change(header)
    content = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(content).to_bytes(8, "little") + content)
        file.truncate(8 + len(content) + data_bytes)


def _overlap(header: dict[str, Any]) -> None:
    header[NORM]["data_offsets"] = header[NORM.replace("q_norm", "k_norm")]["data_offsets"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_overlap, "does not begin where another tensor ends"),
        (lambda header: header.update(__metadata__={"format": 1}), "its header cannot be read"),
        (lambda header: header.update(__metadata__={"format": float("nan")}), "its header cannot be read"),
    ],
)
def test_headers_that_safetensors_refuses(case: Case, change, reason: str) -> None:
    """It would once the GPUs are taken."""
    case.write()
    _rewritten(case, change)
    assert reason in case.refusal()


def test_a_pattern_that_takes_for_ever(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ple_inference.vllm_engine.quantization_config._MATCH_LIMIT_S", 0.2)
    for pattern in (r"re:^([\w.]+)*!", r"re:^(\w+\.?)+!", r"re:(.*.*.*.*.*.*.*.*.*.*)*!"):
        case.write(config=lambda config, p=pattern: config["quantization_config"]["ignore"].append(p))
        line = case.refusal()
        assert f"quantization_config.ignore: '{pattern}' took too long to match {TEXT}" in line
        case.write(
            config=lambda config, p=pattern: config["quantization_config"]["config_groups"]["group_0"].update(
                targets=[p]
            )
        )
        assert f"config_groups.group_0.targets: '{pattern}' took too long" in case.refusal()
