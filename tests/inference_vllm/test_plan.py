"""What `ple-inference plan` says, and that its K/V figures are those of vLLM's own planner."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import released_layout

from ple_inference.settings import load_settings
from ple_inference.vllm_engine import preflight
from ple_inference.vllm_engine.gpus import Gpu
from ple_inference.vllm_engine.kv_figures import KvGroup, KvPlan
from ple_inference.vllm_engine.launch import compose
from ple_inference.vllm_engine.plan import as_text, make_plan
from ple_inference.vllm_engine.refused import Refused

GIB = 2**30


@pytest.fixture(scope="module")
def planner(planner_path: Path) -> Callable[..., dict]:
    """Runs a script beside this file where vLLM's planner can be imported: its JSON."""

    def run(script: str, *arguments: str, given: str = "") -> dict:
        done = subprocess.run(
            [sys.executable, str(Path(__file__).parent / script), *arguments],
            input=given,
            capture_output=True,
            text=True,
            timeout=240,
            env=os.environ | {"PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{planner_path}".lstrip(":")},
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


@pytest.fixture(scope="module")
def cases(planner) -> dict:
    """All cases of planner_cases.py: importing vllm takes seconds, once."""
    return planner("planner_cases.py", given=json.dumps(released_layout.TEXT))


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A released checkpoint of some form, by its headers; its tensors are holes."""

    @cache
    def make(form: str) -> Path:
        folder = tmp_path_factory.mktemp("released")
        released_layout.write(folder, form)
        return folder

    return make


# -- vLLM's planner ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "blocks"),
    [
        ("host off", 42),
        ("host on", 61),
        ("host on, draft", 85),
        ("host off, 12160", 36),
        ("host on, 12160", 49),
    ],
)
def test_the_published_figures_of_kv_in_host_memory(cases, case, blocks) -> None:
    assert cases[case]["blocks_per_request"] == blocks


def test_kv_in_gpu_memory(cases) -> None:
    """A bf16 token takes 2,048 B of a layer, an fp8 token half, a state 3,207,168 B: hence blocks."""
    assert cases["bf16"]["block_tokens"] == 1568
    assert cases["fp8"]["block_tokens"] == 3136
    # Two states for each of three GDN groups and for the n-gram layer, and the ring of raw keys.
    assert cases["bf16"]["fixed_blocks_per_request"] == cases["fp8"]["fixed_blocks_per_request"] == 9
    assert cases["bf16"]["blocks_per_request"] == 9 + -(-262_144 // 1568)
    assert cases["fp8"]["blocks_per_request"] == 9 + -(-262_144 // 3136)
    assert cases["fp8, caching off"]["fixed_blocks_per_request"] == 5


def test_the_smallest_stage_limits_the_pool(cases) -> None:
    fp8 = cases["fp8"]
    # K/V and pooled keys of a stage's four attention layers.
    assert fp8["block_bytes"] == [4 * 3136 * (1024 + 64)] * 3
    assert fp8["pool_blocks"] == 3 * GIB // fp8["block_bytes"][0]
    assert fp8["requests"] == pytest.approx((fp8["pool_blocks"] - 1) / 93)


def test_a_request_takes_the_same_blocks_on_any_number_of_stages(cases) -> None:
    assert cases["fp8, one stage"]["groups"] == cases["fp8"]["groups"]


def test_a_pool_that_is_too_small_for_one_request(cases) -> None:
    assert "262144" in cases["no room"]
    assert "\n" not in cases["no room"]


def test_capacity_of_a_live_engine(cases) -> None:
    live = cases["live"]
    assert live.pop("source")
    assert live == {
        "engine": "vllm",
        "model": "flash-next",
        "num_blocks": 243,
        "fixed_blocks_per_request": 9,
        "tokens_per_block": 3136,
        "max_model_len": 262_144,
        "max_num_seqs": 4,
    }


# -- the command ---------------------------------------------------------------------------------------


def test_plan_of_a_checkpoint_that_fits(machine, released) -> None:
    folder = released("fp8")
    command = ("plan", "--model", str(folder), "--profile", "dual-80gb", "--http-address", "127.0.0.1:9")
    done = machine.run(*command, "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["kv_problem"] is None
    assert (plan["table_stage"], plan["table_layer"]) == (0, 1)
    assert [stage["layers"] for stage in plan["stages"]] == [[0, 24], [24, 48]]
    assert plan["environment"]["VLLM_PP_LAYER_PARTITION"] == "24,24"
    assert plan["kv"]["blocks_per_request"] == 177
    assert plan["kv"]["requests"] > 1
    for stage in plan["stages"]:
        assert (
            stage["reserved_bytes"] + stage["kv_bytes"] + stage["left_bytes"]
            == plan["profile"]["gpu_memory_bytes"]
        )
        assert stage["kv_bytes"] <= stage["kv_room_bytes"]
    # Four slots of 2,048 tokens x 16 rows of 160 B with their ids, each on pages of its own.
    assert plan["host"]["pinned_bytes"] == 4096 + 4 * (4096 + 2048 * 16 * 8 + 2048 * 16 * 160)


def test_int4_mixed_on_three_cards_of_24_gb(planner, released) -> None:
    """By computation: with images requests of 98,304 tokens, without them the whole context."""
    tokens = {"triple-24gb": 98_304, "triple-24gb-text": 262_144}
    plans = planner("planner_profiles.py", str(released("int4-mixed")), *tokens)
    for profile, plan in plans.items():
        assert plan["kv_problem"] is None
        assert plan["kv"]["max_model_len"] == tokens[profile]
        assert 1.1 <= plan["kv"]["requests"] < 2
        vision = [stage["parts"].get("vision", 0) for stage in plan["stages"]]
        assert [size > 0 for size in vision] == [profile == "triple-24gb", False, False]


def test_int4_mixed_is_let_onto_three_cards(released, tmp_path) -> None:
    """RTX 3090s that nobody uses."""
    cards = [Gpu(index, f"GPU-{index}", "Fake", 24_259 * 2**20, 24_200 * 2**20) for index in range(3)]
    flags = {"engine": "vllm", "model": released("int4-mixed"), "profile": "triple-24gb"}
    plan = make_plan(compose(load_settings({}, flags, tmp_path), tmp_path, (), ()))
    preflight._check_gpus(plan.launch, plan.memory, cards)
    large_steps = replace(plan.launch.profile, max_num_batched_tokens=8192)
    with pytest.raises(Refused, match=r"stage \d has .* a smaller --max-num-batched-tokens"):
        preflight._check_gpus(replace(plan.launch, profile=large_steps), plan.memory, cards)


def test_plan_without_vllm(machine, released) -> None:
    folder = released("bf16")
    path = machine.environment()["PYTHONPATH"].rpartition(":")[0]
    done = machine.run("plan", "--model", str(folder), "--profile", "triple-24gb", PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    shell = shlex.split(lines[1])
    assert "VLLM_PP_LAYER_PARTITION=15,17,16" in shell
    assert shell[shell.index("vllm") + 1 :][:2] == ["serve", str(folder)]
    assert json.loads(shell[shell.index("--compilation-config") + 1])["cudagraph_capture_sizes"] == [1, 2, 4]
    assert "K/V: not known: vLLM is not installed here, and the figures come from its planner" in lines
    assert "no room for K/V, and serve refuses it on such a GPU" in lines
    row = next(line for line in lines if line.startswith("0 ")).split("GiB")
    assert [column.split() for column in row[4:5]] == [["not", "known", "not", "known", "23.69"]]
    assert "0.00" not in "".join(row)
    assert lines[-1].startswith("at most ")
    told = machine.run("plan", "--json", "--model", str(folder), "--profile", "triple-24gb", PYTHONPATH=path)
    stages = json.loads(told.stdout)["stages"]
    assert [(stage["kv_bytes"], stage["left_bytes"]) for stage in stages] == [(None, None)] * 3


def test_kv_figures_as_text(released, tmp_path) -> None:
    folder = released("bf16")
    flags = {"engine": "vllm", "model": folder, "profile": "triple-24gb"}
    plan = make_plan(compose(load_settings({}, flags, tmp_path), tmp_path, (), ()))
    groups = (KvGroup("gdn", 36, 2, grows=False), KvGroup("qsa", 24, 84, grows=True))
    kv = KvPlan(3136, groups, (10, 10, 20 * 2**20), 262_144, pool_blocks=173)
    text = as_text(replace(plan, kv=kv, kv_problem="the weights leave no room for K/V"))
    assert "blocks of 3,136 tokens, 20.0 MiB each on the widest stage" in text
    assert "a request of 262,144 tokens: 86 blocks, 2 of them whatever its length" in text
    assert "pool: 172 blocks = 2.00 such requests" in text
    assert "K/V: the weights leave no room for K/V" in text.splitlines()


def test_plan_refuses_what_serve_refuses(machine, tiny_checkpoint) -> None:
    command = ("plan", "--model", str(tiny_checkpoint), "--profile", "single-140gb")
    assert "TP > 1" in machine.refusal(*command, "--", "-tp", "2")
