"""vLLM's own model and loaders on synthetic checkpoints in the INT4-mixed and FP8 layouts, without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import quantized_folders

CHECKOUT = Path(__file__).resolve().parents[2]
LAYERS, SPARSE, TABLE = 4, 3, 1
INT4_EXPERTS = "4 bits, 128, MARLIN"
INT6 = "6 bits, 64, HummingLinearKernel"
INT8_MIXER, INT8 = "8 bits, 64, MarlinLinearKernel", "8 bits, 128, MarlinLinearKernel"
ABSENT = "ValueError: There is no module or parameter named"
PLAIN = "UnquantizedLinearMethod"


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """All of quantized_cases.py: importing vllm takes a while, once."""
    folder = tmp_path_factory.mktemp("quantized")
    quantized_folders.make_all(folder)
    place = CHECKOUT / "var/vllm-planner"
    if not (place / "ready").exists():
        pytest.fail("var/vllm-planner is not there: run `make test`, or `make var/vllm-planner/ready`")
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "quantized_cases.py"), str(folder)],
        capture_output=True,
        text=True,
        timeout=280,
        env=os.environ | {"PYTHONPATH": f"{place}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def expected_kernels() -> dict[str, str]:
    """Module -> kernel, on an sm_86, for 4 layers of the INT4-mixed text model."""
    found = {"model.embed_tokens": "8 bits, 128, CompressedTensorsEmbeddingWNA16Int", "lm_head": INT8}
    mixers = ["model.hyper_connection_mixer"]
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        mixers += [f"{at}.{kind}_hyper_connection" for kind in ("attn", "mlp")]
        found |= {f"{mixer}.block_inject_weight": PLAIN for mixer in mixers[-2:]}
        found |= {f"{at}.mlp.experts.routed_experts": INT4_EXPERTS}
        found |= {f"{at}.mlp.{name}": PLAIN for name in ("gate", "shared_expert_gate")}
        found |= {f"{at}.mlp.shared_expert.{name}": INT6 for name in ("gate_up_proj", "down_proj")}
        if layer == SPARSE:
            found |= {f"{at}.self_attn.{name}_proj": INT6 for name in ("qkv", "o")}
            found |= {f"{at}.self_attn.indexer.index_qk_proj": INT8}
        else:
            found |= {f"{at}.linear_attn.{name}": INT6 for name in ("in_proj_qkvz", "out_proj")}
            found |= {f"{at}.linear_attn.{name}": PLAIN for name in ("in_proj_ba", "conv1d")}
    found |= {f"{mixer}.input_mix_weight_{way}": INT8_MIXER for mixer in mixers for way in ("down", "up")}
    found[f"model.layers.{TABLE}.ple.kv_proj"] = INT8
    table = f"model.layers.{TABLE}.ple.ple_embedding.ngram_embedding"
    return found | {table: "Qwen4ExpPLEUnquantizedEmbeddingMethod"}


def test_every_module_gets_the_kernel_of_its_scheme(cases) -> None:
    assert cases["schemes"]["int4"] == expected_kernels()


def test_the_multimodal_architecture_gets_the_same_and_a_plain_tower(cases) -> None:
    found = cases["schemes"]["int4-images"]
    text = {name: kernel for name, kernel in found.items() if not name.startswith("visual.")}
    assert {
        name.removeprefix("language_model."): kernel for name, kernel in text.items()
    } == expected_kernels()
    assert {kernel for name, kernel in found.items() if name not in text} == {PLAIN}


def test_what_config_json_calls_the_modules_does_not_matter(cases) -> None:
    assert cases["schemes"]["listed"] == cases["schemes"]["int4-images"]
    assert cases["schemes"]["bare"] == cases["schemes"]["fp8"]
    assert "There is no module or parameter named 'lm_head.weight_packed'" in cases["listed, off"]
    # Without the check, BF16 weights become FP8 ones that have no scale, and nobody says so.
    assert cases["bare, off"] == "loaded"
    assert "complete_load: weights were not loaded in full" in cases["bare, off, checked"]


def test_fp8_experts_beside_upstreams_own_bf16_modules(cases) -> None:
    """But for the experts and the table it is built as a BF16 checkpoint is: the overrides change nothing."""
    fp8, bf16 = cases["schemes"]["fp8"], cases["schemes"]["bf16"]
    differing = {name for name in fp8 if fp8[name] != bf16[name]}
    assert fp8.keys() == bf16.keys()
    assert {name.rpartition(".")[2] for name in differing} == {"routed_experts", "ngram_embedding"}
    assert bf16["model.layers.0.attn_hyper_connection.input_mix_weight_down_block_inject"] == PLAIN
    assert "model.layers.3.self_attn.indexer.index_qk_proj" not in bf16  # one product with q, k and v


@pytest.mark.parametrize("name", ["int4", "int4-images", "fp8", "fp8-images"])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_each_rank_is_loaded_in_full_and_holds_what_it_uses(cases, name, stages) -> None:
    ranks = cases["ranks"][f"{name}, {stages}"]
    first = ["embed_tokens", *(["visual"] if "images" in name else [])]
    last = ["lm_head", "hyper_connection_mixer"]
    assert [rank["not loaded"] for rank in ranks] == [[]] * stages
    assert [set(rank["holds"]) for rank in ranks] == [
        {*(first if rank == 0 else []), *(last if rank == stages - 1 else [])} for rank in range(stages)
    ]
    assert sorted(layer for rank in ranks for layer in rank["layers"]) == list(range(LAYERS))
    # Nothing is held twice, and nothing by nobody.
    (whole,) = cases["ranks"][f"{name}, 1"]
    assert sum(rank["parameters"] for rank in ranks) == whole["parameters"]


def test_without_images_no_rank_has_the_tower(cases) -> None:
    """What triple-24gb-text reckons with, of a checkpoint that has one."""
    ranks = cases["no images"]
    assert [rank["not loaded"] for rank in ranks] == [[], []]
    assert [set(rank["holds"]) for rank in ranks] == [{"embed_tokens"}, {"lm_head", "hyper_connection_mixer"}]
    assert [rank["layers"] for rank in ranks] == [rank["layers"] for rank in cases["ranks"]["int4, 2"]]


@pytest.mark.parametrize(
    ("off", "ending"),
    [
        ("quantized_embeddings", f"{ABSENT} 'lm_head.weight_packed'"),
        ("hyper_connections", f"{ABSENT} 'hyper_connection_mixer.input_mix_weight_down.weight_packed'"),
        ("qsa_projection", "AssertionError"),
        ("placement", "loaded"),
        ("complete_load", "loaded"),
        ("checkpoint_schemes", "loaded"),  # this config speaks of modules in words that vLLM understands
    ],
)
def test_without_an_override(cases, off, ending) -> None:
    assert cases["off"][off].startswith(ending)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("lacks-linear-scale", "checkpoint_schemes: the checkpoint has model.layers.0.linear_attn.out_proj"),
        ("lacks-shard-scale", "checkpoint_schemes: the checkpoint has model.layers.3.self_attn.k_proj"),
        (
            "lacks-head-scale",
            "the checkpoint has lm_head.weight_packed and no .weight_scale of it",
        ),
        ("lacks-fp8-scale", "model.layers.0.mlp.experts.3.gate_proj.weight and no .weight_scale_inv of it"),
        ("lacks-packed", "linear_attn.out_proj.weight_scale and no .weight_packed of it"),
        ("lacks-shard", "self_attn.k_proj.weight_scale and no .weight_packed of it"),
        (
            "lacks-expert-scale",
            "model.layers.2.mlp.experts.5.up_proj.weight_packed and no .weight_scale of it",
        ),
        ("lacks-expert", "model.layers.1.mlp.experts.4.down_proj.weight_scale and no .weight_packed of it"),
        ("lacks-last-expert", "not in the checkpoint: model.layers.0.mlp.experts.5."),
        ("lacks-norm", "not loaded in full: model.layers.2.linear_attn.norm.weight"),
        ("lacks-plain-shard", "not loaded in full: model.layers.2.linear_attn.in_proj_ba.weight"),
    ],
)
def test_a_missing_scale_or_weight_ends_the_start_with_one_line(cases, fault, words) -> None:
    assert cases["lacks"][fault].startswith("OverrideError: triplex: ")
    assert words in cases["lacks"][fault]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("lacks-linear-scale", "not loaded in full: model.layers.0.linear_attn.out_proj.weight_scale"),
        ("lacks-shard-scale", "not loaded in full: model.layers.3.self_attn.qkv_proj.weight_scale"),
        ("lacks-head-scale", "not loaded in full: lm_head.weight_scale"),
        ("lacks-fp8-scale", "not in the checkpoint: model.layers.0.mlp.experts.3.gate_proj.weight_scale_inv"),
        ("lacks-expert-scale", "not in the checkpoint: model.layers.2.mlp.experts.5.up_proj.weight_scale"),
        ("lacks-expert", "not in the checkpoint: model.layers.1.mlp.experts.4.down_proj.weight_packed"),
    ],
)
def test_the_check_after_the_load_finds_it_as_well(cases, fault, words) -> None:
    assert cases["lacks, unread"][fault].startswith("OverrideError: triplex: complete_load: weights ")
    assert words in cases["lacks, unread"][fault]


@pytest.mark.parametrize(
    "fault", ["lacks-expert-scale", "lacks-expert", "lacks-norm", "lacks-plain-shard", "lacks-fp8-scale"]
)
def test_without_both_vllm_loads_what_is_missing(cases, fault) -> None:
    assert cases["lacks, off"][fault] == "loaded"


def test_the_residual_is_its_formula_over_decoded_weights(cases) -> None:
    """Outputs are bf16; by the weights of another residual they would be far from it."""
    for difference, other in cases["residual"].values():
        assert 0 < difference < 2**-7
        assert other > 0.1


def test_weights_of_one_product_in_two_schemes_are_refused(cases) -> None:
    assert cases["mixed"] == (
        "triplex: checkpoint_schemes: model.layers.3.self_attn.k_proj is int8 in groups of 64 and "
        "model.layers.3.self_attn.q_proj is int6 in groups of 64: vLLM computes both in one product, so "
        "store them alike"
    )
