"""What a new release of vLLM changed in the symbols of the records."""

import subprocess
import sys

import pytest

from ple_inference.vllm_plugin import vllm_diff
from ple_inference.vllm_plugin.overrides import ALL
from ple_inference.vllm_plugin.wheel_source import SourceMissing, WheelSource

CHANGED = "vllm.v1.worker.utils:allocate_kv_cache"
GONE = "vllm.models.qwen4_exp.nvidia.model_state:Qwen4ExpModelState"


@pytest.fixture
def wheels(make_wheel, relied_files):
    path = "vllm/v1/worker/utils.py"
    edited = relied_files[path].replace(b"buf_size = raw_size\n", b"buf_size = raw_size + 4096\n")
    assert edited != relied_files[path]
    return make_wheel(), make_wheel({path: edited, "vllm/models/qwen4_exp/nvidia/model_state.py": None})


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ple_inference.vllm_plugin", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_each_symbol_gets_one_verdict(wheels):
    old, new = map(WheelSource.at, wheels)
    found = {change.symbol: change for change in vllm_diff.changes(old, new, ALL)}
    assert set(found) == {upstream.symbol for override in ALL for upstream in override.upstream}
    differing = {symbol: change.verdict for symbol, change in found.items() if change.verdict != "same"}
    assert differing == {CHANGED: "changed", GONE: "gone"}
    assert found[CHANGED].overrides == ("pp_orphan_kv",)
    assert "\n-        buf_size = raw_size\n+        buf_size = raw_size + 4096\n" in found[CHANGED].diff


def test_one_release_equals_itself(wheels):
    source = WheelSource.at(wheels[0])
    assert {change.verdict for change in vllm_diff.changes(source, source, ALL)} == {"same"}


def test_an_old_release_must_have_what_the_records_name(wheels):
    old, new = map(WheelSource.at, wheels)
    with pytest.raises(SourceMissing, match="model_state"):
        list(vllm_diff.changes(new, old, ALL))


def test_the_command_prints_verdicts_and_diffs(wheels):
    done = run("diff", *wheels)
    assert done.returncode == 0, done.stderr
    assert f"changed  {CHANGED}  (pp_orphan_kv)\n" in done.stdout
    assert f"gone     {GONE}  (pp_model_state)\n" in done.stdout
    assert "+        buf_size = raw_size + 4096\n" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("2 of ")


def test_the_check_command_passes_one_and_refuses_the_other(wheels):
    old, new = wheels
    assert run("check", old).returncode == 0
    done = run("check", new)
    assert done.returncode == 1
    assert "pp_model_state" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_sha256_command_prints_an_entry(wheels, vllm_source):
    done = run("sha256", wheels[0], CHANGED)
    assert done.stdout == f'Upstream(\n    "{CHANGED}",\n    "{vllm_source.sha256(CHANGED)}",\n),\n'
