"""Checkpoints that `serve` and `plan` refuse by their headers, before any GPU is looked at."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import released_layout
from refused_case import EXPERT, EXPERTS, FILE, LAYERS, QKV, TEXT, Case, Shapes

from ple_inference.vllm_engine import preflight

# -- files ---------------------------------------------------------------------------------------------


def test_a_missing_shard(case: Case) -> None:
    case.write()
    case.change("model.safetensors.index.json", lambda index: index["weight_map"].update(a="two.safetensors"))
    assert f"cannot read {case.folder}/two.safetensors: No such file" in case.refusal()


def test_a_shard_that_was_not_copied_to_its_end(case: Case) -> None:
    case.write()
    with (case.folder / FILE).open("r+b") as file:
        file.truncate(file.seek(0, 2) - 1)
    assert f"{FILE} ends within model.visual." in case.refusal()


def test_a_shard_of_another_size(case: Case) -> None:
    case.write()
    with (case.folder / FILE).open("ab") as file:
        file.write(b"more")
    line = case.refusal()
    assert f"{FILE} has " in line
    assert "bytes, its header describes" in line


def test_an_index_that_names_absent_tensors(case: Case) -> None:
    case.write()
    case.change("model.safetensors.index.json", lambda index: index["weight_map"].update(a=FILE))
    assert f"{FILE} lacks a, which the index says is there" in case.refusal()


# -- config.json ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("architectures", [["LlamaForCausalLM"], None, []])
def test_another_architecture(case: Case, architectures: list[str] | None) -> None:
    case.write(config=lambda config: config.update(architectures=architectures))
    line = case.refusal()
    assert "config.json: architectures is " in line
    assert "served is Qwen4ExpForConditionalGeneration or Qwen4ExpForCausalLM" in line


def _weights(**fields: object) -> Callable[[dict[str, Any]], object]:
    """Changes the first group, of the experts."""
    return lambda config: config["quantization_config"]["config_groups"]["group_0"]["weights"].update(fields)


def _quantization(**fields: object) -> Callable[[dict[str, Any]], object]:
    return lambda config: config["quantization_config"].update(fields)


def _targets(targets: object) -> Callable[[dict[str, Any]], object]:
    """Changes the first group, of the experts."""
    return lambda config: config["quantization_config"]["config_groups"]["group_0"].update(targets=targets)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda config: config["quantization_config"].update(quant_method="gptq"),
            "quant_method 'gptq' is not",
        ),
        (
            lambda config: config["quantization_config"]["config_groups"]["group_1"].update(
                format="marlin-24"
            ),
            "config_groups.group_1: format 'marlin-24' is not served",
        ),
        (lambda config: config["quantization_config"].pop("config_groups"), "has no config_groups"),
        (lambda config: config.pop("quantization_config"), "is packed, config.json says no quantization"),
        (_weights(symmetric=False), "weights.symmetric is False, served is True"),
        (_weights(num_bits=3), "3 bits in groups of 128 are not served"),
        (_weights(group_size=64), "4 bits in groups of 128, config.json says 4 bits in groups of 64"),
        (_weights(actorder="group"), "weights.actorder 'group' is not served"),
        (_weights(num_bits=float("inf")), "inf bits in groups of 128 are not served"),
        (_weights(num_bits=4.5), "4.5 bits in groups of 128 are not served"),
        (_weights(group_size="128"), "4 bits in groups of '128' are not served"),
        (_quantization(ignore=True), "quantization_config.ignore is no list of names"),
        (_quantization(ignore="lm_head"), "quantization_config.ignore is no list of names"),
        (_quantization(ignore=[None]), "quantization_config.ignore is no list of names"),
        (_quantization(ignore=["re:("]), "ignore: 're:(' is no regular expression: missing )"),
        (_targets(None), "config_groups.group_0.targets is no list of names"),
        (_targets({"Linear": 1}), "config_groups.group_0.targets is no list of names"),
        (_targets(["re:a{99999999999}"]), "is no regular expression: "),
    ],
)
def test_a_quantization_that_is_not_served(case: Case, change, reason: str) -> None:
    case.write(config=change)
    assert reason in case.refusal()


def test_thousands_of_patterns_are_each_compiled_once(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than `re` keeps: each would be compiled for every module."""
    compiled = Counter[object]()
    compile_one = re.compile

    def counted(pattern: str, flags: int = 0) -> re.Pattern[str]:
        compiled[pattern] += 1
        return compile_one(pattern, flags)

    patterns = [f"other{number}$" for number in range(2000)]
    ignored = [f"re:{pattern}" for pattern in patterns]
    case.write(config=lambda config: config["quantization_config"]["ignore"].extend(ignored))
    monkeypatch.setattr(re, "compile", counted)
    case.succeed("plan")
    assert {compiled[pattern] for pattern in patterns} == {1}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"rope_parameters": True}, "text_config.rope_parameters is no object"),
        ({"rope_parameters": [0.25]}, "text_config.rope_parameters is no object"),
        ({"rope_parameters": {"partial_rotary_factor": None}}, "partial_rotary_factor is None, not a number"),
        ({"rope_parameters": {"partial_rotary_factor": "0.25"}}, "partial_rotary_factor is '0.25'"),
        ({"partial_rotary_factor": 10**40}, "partial_rotary_factor is 1000"),
        ({"partial_rotary_factor": float("nan")}, "partial_rotary_factor is nan"),
        ({"partial_rotary_factor": 0}, "partial_rotary_factor is 0"),
    ],
)
def test_rotary_parameters_of_another_kind(case: Case, fields: dict[str, Any], reason: str) -> None:
    case.write(config=lambda config: config["text_config"].update(fields))
    assert reason in case.refusal()


def test_plain_weights_that_the_config_calls_packed(case: Case) -> None:
    def unpack(shapes: Shapes) -> None:
        for suffix in ("packed", "scale", "shape"):
            del shapes[f"lm_head.weight_{suffix}"]
        shapes["lm_head.weight"] = ("BF16", [248_320, 2560])

    case.write(tensors=unpack)
    assert "lm_head is plain BF16, config.json says that it is packed" in case.refusal()


@pytest.mark.parametrize("form", ["bf16", "fp8", "int4-mixed"])
def test_a_text_model_is_planned_and_not_served_without_a_tokenizer(
    case: Case, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    released_layout.write(case.folder, form, LAYERS, experts=EXPERTS, text_only=True)
    (case.folder / "tokenizer.json").unlink()
    plan = json.loads(case.succeed("plan", "--json"))
    assert plan["stages"][0]["parts"]["GDN"] > 0
    assert "vision" not in plan["stages"][0]["parts"]
    assert plan["reads_per_token"]["weights_bytes"] > 0
    monkeypatch.setattr(preflight, "_check_plugin", lambda launch: None)
    # Another process of this machine may listen there.
    monkeypatch.setattr(preflight, "_check_port", lambda address: None)
    assert "has no tokenizer.json, and nothing is served without one" in case.run_refused(
        "serve", "--engine", "vllm"
    )


# -- packed tensors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda shapes: shapes.pop(f"{EXPERT}.weight_scale"), f"{EXPERT} has no weight_scale"),
        (lambda shapes: shapes.pop(f"{EXPERT}.weight_shape"), f"{EXPERT} has no weight_shape"),
        (
            lambda shapes: shapes.update({f"{EXPERT}.weight_shape": ("I32", [2])}),
            f"{EXPERT}.weight_shape is I32 [2], not I64 [2]",
        ),
        (
            lambda shapes: shapes.update({f"{QKV}.weight_shape": ("I64", [3])}),
            f"{QKV}.weight_shape is I64 [3], not I64 [2]",
        ),
        (
            lambda shapes: [shapes.pop(name) for name in list(shapes) if name.startswith(EXPERT)],
            "layers.2.mlp.experts.1.up_proj is missing of 3 experts",
        ),
        (
            lambda shapes: [shapes.pop(name) for name in list(shapes) if ".layers.2.mlp.experts." in name],
            "layers.2.mlp.experts are missing",
        ),
        (
            lambda shapes: shapes.update({f"{QKV}.weight_scale": ("F32", [12_288, 40])}),
            f"{QKV}.weight_scale is F32, not F16 or BF16",
        ),
        (
            lambda shapes: shapes.update({f"{QKV}.weight_packed": ("I32", [12_288, 512])}),
            "512 words a row: 6 bits as 5 values a word, as the library compressed-tensors packs them",
        ),
        (
            lambda shapes: shapes.update({f"{QKV}.weight_packed": ("I32", [12_288, 400])}),
            "400 words a row; 2560 columns of 4, 6 or 8 bits have 320, 480, 640",
        ),
        (
            lambda shapes: shapes.update({f"{QKV}.weight_scale": ("F16", [12_288, 41])}),
            "weight_scale is [12288, 41], which gives 12288 rows of 2560 columns no whole groups",
        ),
        (
            lambda shapes: shapes.update({f"{EXPERT}.weight_scale": ("F16", [640, 40])}),
            "0.gate_proj is stored as 4 bits in groups of 128 and 1.up_proj as 4 bits in groups of 64",
        ),
        (
            lambda shapes: shapes.update({f"{QKV}.weight_zero_point": ("I32", [384, 40])}),
            f"{QKV}.weight_zero_point: only symmetric weights in order are served",
        ),
        (
            lambda shapes: shapes.update({f"{TEXT}layers.0.odd.weight_packed": ("I32", [1, 1])}),
            f"{TEXT}layers.0.odd is quantized, and it is no matrix of the decoder",
        ),
        (
            lambda shapes: shapes.pop(f"{TEXT}layers.1.mlp.gate.weight"),
            "the checkpoint has no layers.1.mlp.gate.weight, packed or not",
        ),
        (
            lambda shapes: shapes.update({f"{TEXT}layers.1.mlp.gate.weight": ("BF16", [5, 2560])}),
            "mlp.gate.weight is [5, 2560], the config wants [3, 2560]",
        ),
    ],
)
def test_packed_weights_that_do_not_fit(case: Case, change, reason: str) -> None:
    case.write(tensors=change)
    assert reason in case.refusal()


def test_parts_of_one_product_in_two_forms(case: Case) -> None:
    """The config allows both; vLLM's one matrix does not."""
    key = f"{TEXT}layers.3.self_attn.k_proj"
    case.write(
        tensors=lambda shapes: shapes.update(
            {f"{key}.weight_packed": ("I32", [512, 640]), f"{key}.weight_scale": ("F16", [512, 20])}
        ),
        config=lambda config: config["quantization_config"]["config_groups"]["group_3"]["targets"].append(
            key
        ),
    )
    line = case.refusal()
    assert "layers.3.self_attn.q_proj is stored as 6 bits in groups of 64" in line
    assert "layers.3.self_attn.k_proj as 8 bits in groups of 128" in line


def test_groups_named_by_class_or_by_module(case: Case) -> None:
    """However the config spells its targets, what the tensors say is taken."""

    def respell(config: dict[str, Any]) -> None:
        groups = config["quantization_config"]["config_groups"]
        groups["group_0"]["targets"] = ["Linear"]
        groups["group_2"]["targets"] = [
            f"{TEXT}layers.{layer}.{kind}_hyper_connection.input_mix_weight_{way}"
            for layer in range(LAYERS)
            for kind in ("attn", "mlp")
            for way in ("down", "up")
        ] + [f"{TEXT}hyper_connection_mixer.input_mix_weight_{way}" for way in ("down", "up")]

    case.write(config=respell)
    assert json.loads(case.succeed("plan", "--json"))["stages"][0]["weights_bytes"] > 0


# -- fp8 -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda shapes: shapes.pop(f"{EXPERT}.weight_scale_inv"),
            f"{EXPERT} is fp8 and has no weight_scale_inv",
        ),
        (
            lambda shapes: shapes.update({f"{EXPERT}.weight_scale_inv": ("F16", [5, 20])}),
            f"{EXPERT}.weight_scale_inv is F16 [5, 20], not BF16 [5, 20]",
        ),
        (
            lambda shapes: shapes.update({f"{EXPERT}.weight_scale_inv": ("BF16", [5, 5])}),
            f"{EXPERT}.weight_scale_inv is BF16 [5, 5], not BF16 [5, 20]",
        ),
        (
            lambda shapes: shapes.pop(f"{TEXT}layers.1.ple.ple_embedding.ngram_embedding.weight_scale"),
            "is fp8 and the table has no weight_scale",
        ),
    ],
)
def test_fp8_weights_that_do_not_fit(case: Case, change, reason: str) -> None:
    case.write("fp8", tensors=change)
    assert reason in case.refusal()


def test_fp8_blocks_of_another_size(case: Case) -> None:
    case.write("fp8", config=lambda config: config["quantization_config"].update(weight_block_size=[64, 64]))
    assert "weight_block_size [64, 64] is not served" in case.refusal()
