"""`ple-inference serve --engine vllm`: what it refuses, and what it becomes."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import struct
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from ple_inference.checkpoint import CheckpointError, read_checkpoint
from ple_inference.vllm_engine import preflight
from ple_inference.vllm_engine.gpus import Gpu, visible_gpus
from ple_inference.vllm_engine.host_memory import HostMemory
from ple_inference.vllm_engine.model_config import check_config
from ple_inference.vllm_engine.pipeline import Pipeline
from ple_inference.vllm_engine.profile import PROFILES
from ple_inference.vllm_engine.profile_arguments import take_in
from ple_inference.vllm_engine.rank_memory import RankMemory
from ple_inference.vllm_engine.refused import Refused
from ple_inference.vllm_engine.tensors import Tensors
from ple_inference.vllm_engine.vllm_arguments import refuse_environment, refuse_unserved


def serve(model: Path, *arguments: str, profile: str = "single-140gb") -> tuple[str, ...]:
    return ("serve", "--engine", "vllm", "--model", str(model), "--profile", profile, *arguments)


def plan(model: Path, *arguments: str) -> tuple[str, ...]:
    return ("plan", "--model", str(model), "--profile", "single-140gb", *arguments)


@pytest.fixture
def copy(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """The tiny checkpoint's JSON files, to be spoilt."""
    folder = tmp_path / "copy"
    folder.mkdir()
    for path in tiny_checkpoint.glob("*.json"):
        shutil.copy(path, folder)
    return folder


def change_config(folder: Path, change: Callable[[dict], object]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


# -- what is asked for ---------------------------------------------------------------------------------


def test_profiles_by_name(machine, tiny_checkpoint) -> None:
    assert "needs --profile; profiles are triple-24gb, " in machine.refusal(
        *serve(tiny_checkpoint, profile="")
    )
    assert "no profile 'huge'" in machine.refusal(*serve(tiny_checkpoint, profile="huge"))
    line = machine.refusal(*serve(tiny_checkpoint, profile="triple-24gb-mtp"))
    assert "MTP" in line
    assert "not built yet" in line


def test_a_folder_that_is_no_checkpoint(machine, copy) -> None:
    assert "no such model folder: /nowhere" in machine.refusal(*serve(Path("/nowhere")))
    (copy / "config.json").unlink()
    assert f"cannot read {copy}/config.json" in machine.refusal(*serve(copy))


def test_more_than_one_ple_layer(machine, copy) -> None:
    change_config(copy, lambda config: config["text_config"].update(ple_layer_ids=[2, 3]))
    assert "has 2 n-gram (PLE) layers; exactly one is served" in machine.refusal(*serve(copy))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hc_count": None}, "config.json has no text_config.hc_count"),
        ({"num_hidden_layers": 5}, "names 4 layer_types for 5 layers"),
        ({"layer_types": 4}, "layer_types is no list of names"),
        ({"head_dim": "256"}, "text_config.head_dim is '256', not a number of at least 1"),
        ({"hidden_size": []}, "text_config.hidden_size is [], not a number"),
        ({"hc_count": -1}, "text_config.hc_count is -1, not a number"),
        ({"max_position_embeddings": 10**30}, "max_position_embeddings is 1000000000"),
        ({"ngram_size": 1}, "text_config.ngram_size is 1, not a number of at least 2"),
        ({"ple_embed_dim": "x"}, "text_config.ple_embed_dim is 'x'"),
        ({"eos_token_id": []}, "text_config.eos_token_id is [], not a token's id"),
        ({"ple_layer_ids": [9]}, "ple_layer_ids names layer 9, there are 4"),
        ({"dtype": ["bfloat16"]}, "dtype ['bfloat16'] is no name"),
    ],
)
def test_a_config_that_cannot_be_used(copy, change, reason) -> None:
    change_config(copy, lambda config: config["text_config"].update(change))
    with pytest.raises(CheckpointError) as refused:
        check_config(read_checkpoint(copy))
    assert reason in str(refused.value)


def test_a_config_too_deep_to_read(copy) -> None:
    (copy / "config.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="is not JSON"):
        read_checkpoint(copy)


def test_a_partition_of_another_model(machine, tiny_checkpoint) -> None:
    line = machine.refusal(*serve(tiny_checkpoint, profile="triple-24gb"))
    assert "splits 48 layers (15,17,16), there are 4" in line
    assert "5 pipeline stages for 4 layers" in machine.refusal(*serve(tiny_checkpoint, "--pp", "5"))


@pytest.mark.parametrize(
    ("stages", "named"),
    [
        ("2", "the partition 2,2 leaves stage 0 (layers 0 to 1) no full-attention layer"),
        ("4", "the partition 1,1,1,1 leaves stage 0 (layers 0 to 0) no full-attention layer"),
    ],
)
@pytest.mark.parametrize("command", [serve, plan])
def test_a_stage_of_linear_attention_alone(machine, tiny_checkpoint, command, stages, named) -> None:
    assert named in machine.refusal(*command(tiny_checkpoint, "--pp", stages))


LINEAR, FULL = "linear_attention", "full_attention"


@pytest.mark.parametrize(
    ("layer_types", "stages", "reason"),
    [
        ([LINEAR, FULL, LINEAR, LINEAR, LINEAR, FULL], 3, r"stage 1 \(layers 2 to 3\) no"),
        ([FULL, LINEAR, LINEAR, FULL, LINEAR, LINEAR], 3, r"stage 2 \(layers 4 to 5\) no"),
        ([LINEAR, FULL, FULL, LINEAR], 2, None),
        ([LINEAR] * 4, 1, None),
    ],
)
def test_every_stage_has_full_attention(layer_types, stages, reason) -> None:
    profile = replace(PROFILES["single-140gb"], stages=stages)
    if reason is None:
        assert Pipeline.of(profile, layer_types, 0).stages == stages
    else:
        with pytest.raises(Refused, match=reason):
            Pipeline.of(profile, layer_types, 0)


def test_a_file_that_the_index_promises(machine, copy) -> None:
    assert "cannot read " in machine.refusal(*serve(copy))


def test_a_file_that_is_not_whole(copy, write_tensors) -> None:
    write_tensors(copy, {"a": ("BF16", [8]), "b": ("BF16", [8])})
    with (copy / "model.safetensors").open("r+b") as file:
        file.truncate(file.seek(0, 2) - 1)
    with pytest.raises(CheckpointError, match=r"model\.safetensors ends within b"):
        Tensors.of(copy)


def test_an_index_that_names_the_wrong_file(copy, write_tensors) -> None:
    write_tensors(copy, {"a": ("BF16", [8])})
    (copy / "model.safetensors").rename(copy / "one.safetensors")
    write_tensors(copy, {"b": ("BF16", [8])})
    index = {"weight_map": {"a": "model.safetensors", "b": "one.safetensors"}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"model\.safetensors lacks a, which the index says is there"):
        Tensors.of(copy)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "I64", "shape": [1], "data_offsets": [8, 0]},
        {"dtype": "I64", "shape": [1], "data_offsets": [0, 8.0]},
        {"dtype": "I64", "shape": [-1], "data_offsets": [0, 8]},
        {"dtype": "I64", "shape": "1", "data_offsets": [0, 8]},
    ],
)
def test_a_header_that_makes_no_sense(copy, entry) -> None:
    content = json.dumps({"a": entry}).encode()
    (copy / "one.safetensors").write_bytes(struct.pack("<Q", len(content)) + content + bytes(16))
    index = {"weight_map": {"a": "one.safetensors"}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="its header cannot be read"):
        Tensors.of(copy)


@pytest.mark.parametrize(
    ("tensor", "dtype", "reason"),
    [
        ("model.language_model.layers.1.ple.ple_embedding.ngram_embedding.shard_0.weight", "U8", "NVFP4"),
        ("model.language_model.layers.1.ple.ple_embedding.ngram_embedding.weight_scale_2", "F32", "NVFP4"),
        (
            "model.language_model.layers.1.ple.ple_embedding.ngram_embedding.shard_0.weight",
            "F32",
            "f32 table",
        ),
        (
            "model.language_model.layers.1.ple.ple_embedding.ngram_embedding.shard_0.weight",
            "F8_E4M3",
            "the table has no weight_scale",
        ),
    ],
)
def test_tensors_that_cannot_be_loaded(machine, copy, write_tensors, tensor, dtype, reason) -> None:
    write_tensors(copy, {tensor: (dtype, [4])})
    line = machine.refusal(*serve(copy))
    assert reason in line
    assert tensor in line


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--tensor-parallel-size", "2"], "TP > 1"),
        (["--tensor_parallel_size=2"], "TP > 1"),
        (["--tensor-par", "4"], "TP > 1"),
        (["-tp", "2"], "TP > 1"),
        (["-tp=2"], "TP > 1"),
        (["--data-parallel-size", "2"], "DP > 1"),
        (["-dpl", "2"], "data parallelism"),
        (["--data-parallel-size-local=1"], "data parallelism"),
        (["--mamba-cache-mode", "align"], "ignores it"),
        (["--speculative-config", "{}"], "MTP"),
        (["--speculative_config.method", "mtp"], "MTP"),
        (["--spec-method", "mtp"], "MTP"),
        (["--additional-config", "{}"], "--disable NAME"),
        (["--worker-cls", "x.Y"], "plugin's worker"),
        (["--config", "x.yaml"], "one by one"),
        (["-pp", "2"], "--pp"),
        (["--port", "1"], "--http-address"),
    ],
)
def test_arguments_that_are_not_served(arguments, reason) -> None:
    with pytest.raises(Refused) as refused:
        refuse_unserved(arguments)
    assert reason in str(refused.value)


def test_arguments_that_are() -> None:
    refuse_unserved(
        ["-tp", "1", "--seed", "1", "--middleware", "a.B", "--max-log-len=4", "--data-parallel-size=1"]
    )


def test_arguments_that_change_the_profile() -> None:
    profile = PROFILES["triple-24gb"]
    changed, rest = take_in(
        profile, ["--max_num_seqs=8", "--seed", "1", "--no-enable-prefix-caching", "--kv-cache-dtype", "auto"]
    )
    assert (changed.max_num_seqs, changed.prefix_caching, changed.kv_cache_dtype) == (8, False, "auto")
    assert changed.capture_sizes == (1, 2, 4, 8)
    assert rest == ("--seed", "1")
    shortened, rest = take_in(profile, ["--gpu-mem", "0.3", "--max-num-s=2"])  # vLLM takes these too
    assert (shortened.gpu_memory_utilization, shortened.max_num_seqs, rest) == (0.3, 2, ())
    for wrong in (["--max-num-seqs", "x"], ["--gpu-memory-utilization", "1.2"], ["--max-model-len", "0"]):
        with pytest.raises(Refused, match="after the --"):
            take_in(profile, wrong)


def test_a_length_that_the_checkpoint_does_not_allow(machine, tiny_checkpoint) -> None:
    line = machine.refusal(*serve(tiny_checkpoint, "--", "--max-model-len", "40000"))
    assert "max_model_len is 40000, the checkpoint allows 32768" in line


def test_a_lookup_that_would_outlast_its_step(machine, tiny_checkpoint) -> None:
    line = machine.refusal(*serve(tiny_checkpoint), PLE_INFERENCE_LOOKUP_DEADLINE_S="300")
    assert "lookup_deadline_s is 300; vLLM ends a step after 300 s" in line


def test_an_empty_address_of_the_table(machine, tiny_checkpoint) -> None:
    line = machine.refusal(*serve(tiny_checkpoint, "--table", ""))
    assert "PLE_INFERENCE_TABLE_ADDRESS is ''" in line


def test_an_environment_that_makes_another_engine() -> None:
    with pytest.raises(Refused, match="V1 runner"):
        refuse_environment({"VLLM_USE_V2_MODEL_RUNNER": "0"})
    with pytest.raises(Refused, match="leaves the triplex plugin out"):
        refuse_environment({"VLLM_PLUGINS": "other"})
    refuse_environment({"VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_PLUGINS": "other,triplex"})


# -- what the machine is -------------------------------------------------------------------------------


def test_a_vllm_that_is_not_installed_or_another(machine, tiny_checkpoint, tmp_path) -> None:
    line = machine.refusal(
        *serve(tiny_checkpoint), PYTHONPATH=machine.environment()["PYTHONPATH"].rpartition(":")[0]
    )
    assert "vllm is not installed" in line
    edited = tmp_path / "edited"
    shutil.copytree(machine.vllm / "vllm-0.33.0.dist-info", edited / "vllm-0.33.0.dist-info")
    (edited / "vllm").mkdir()
    path = f"{edited}:{machine.environment()['PYTHONPATH'].rpartition(':')[0]}"
    assert "install vllm==0.33.0, unmodified" in machine.refusal(*serve(tiny_checkpoint), PYTHONPATH=path)


def test_an_override_that_is_not_there(machine, tiny_checkpoint) -> None:
    assert "there is no override 'nothing'" in machine.refusal(
        *serve(tiny_checkpoint, "--disable", "nothing")
    )


def test_v1_runner(machine, tiny_checkpoint) -> None:
    assert "V1 runner" in machine.refusal(*serve(tiny_checkpoint), VLLM_USE_V2_MODEL_RUNNER="0")


def test_port_taken(machine, tiny_checkpoint) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        line = machine.refusal(*serve(tiny_checkpoint, "--http-address", address))
    assert f"cannot listen on {address}" in line


def test_gpus_that_do_not_do(machine, deep_checkpoint) -> None:
    command = serve(deep_checkpoint, "--pp", "2")
    assert "2 pipeline stages need 2 GPUs and 1 can be seen" in machine.refusal(
        *command, FAKE_GPUS=machine.gpus(1)
    )
    assert "and 1 can be seen" in machine.refusal(*command, CUDA_VISIBLE_DEVICES="2")
    small = machine.refusal(*command, FAKE_GPUS=machine.gpus(2, total_mib=1024, reserved_mib=0))
    assert "GPU 0 (Fake) gives 0.95 GiB of 1.00 GiB" in small
    busy = machine.refusal(*command, FAKE_GPUS=machine.gpus(2, free_mib=2048))
    assert "GPU 0 (Fake) has 2.00 GiB free and vLLM will take 22.51 GiB" in busy
    (machine.folder / "bin/nvidia-smi").write_text("#!/bin/sh\necho driver mismatch >&2; exit 9\n")
    assert "nvidia-smi failed: driver mismatch" in machine.refusal(*command)


def test_a_load_that_takes_more_than_the_gpu_has() -> None:
    """What stays would fit; the copies that vLLM repacks from do not."""
    gib = 2**30
    profile = PROFILES["triple-24gb"]
    launch = SimpleNamespace(pipeline=SimpleNamespace(stages=1), profile=profile)
    rank = RankMemory({"routed experts": 20 * gib}, 20 * gib, 21 * gib, 26 * gib, 24 * gib)
    gpu = Gpu(0, "GPU-0", "Fake", 24 * gib, 24 * gib)
    reason = r"stage 0 takes 24\.00 GiB while vLLM repacks its weights; GPU 0 \(Fake\) has 24\.00 GiB"
    with pytest.raises(Refused, match=reason):
        preflight._check_gpus(launch, [rank], [gpu])
    preflight._check_gpus(launch, [replace(rank, peak_allocated_bytes=23 * gib)], [gpu])


def test_what_the_driver_keeps_is_not_there(machine, monkeypatch) -> None:
    """A driver that does not tell is believed to keep nothing."""
    monkeypatch.setenv("PATH", machine.environment()["PATH"])
    for reserved, total_mib in ((317, 24_259), ("[N/A]", 24_576), ("[Not Supported]", 24_576)):
        monkeypatch.setenv("FAKE_GPUS", machine.gpus(1, reserved_mib=reserved).replace("\\n", "\n"))
        assert [gpu.total_bytes for gpu in visible_gpus(None)] == [total_mib * 2**20]


def test_gpus_in_the_order_of_the_environment(machine, monkeypatch) -> None:
    monkeypatch.setenv("PATH", machine.environment()["PATH"])
    monkeypatch.setenv("FAKE_GPUS", machine.gpus(3).replace("\\n", "\n"))
    assert [gpu.index for gpu in visible_gpus("2,GPU-0")] == [2, 0]
    assert [gpu.index for gpu in visible_gpus("1,9,0")] == [1]
    assert visible_gpus("") == []
    assert [gpu.total_bytes for gpu in visible_gpus(None)] == [24_259 * 2**20] * 3


def test_too_little_ram(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(preflight, "available_bytes", lambda: 2**30)
    with pytest.raises(
        Refused, match=r"1\.00 GiB of RAM are available, vLLM's 5 processes want about 10\.01 GiB"
    ):
        preflight._check_host_memory(HostMemory(10 * 2**20, 5))


# -- the table -----------------------------------------------------------------------------------------


def test_a_daemon_that_never_comes(machine, tiny_checkpoint, tmp_path) -> None:
    done = machine.run(
        *serve(tiny_checkpoint, "--table", f"unix:{tmp_path}/no.sock"),
        PLE_INFERENCE_TABLE_WAIT_DEADLINE_S="1",
    )
    assert done.returncode == 1
    assert "waiting for the table daemon address=unix:" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("ple-inference: no answer from unix:")


def test_the_table_of_another_checkpoint(machine, tiny_checkpoint, daemon_address, copy) -> None:
    for path in tiny_checkpoint.glob("*.safetensors"):
        (copy / path.name).symlink_to(path)
    change_config(copy, lambda config: config["text_config"].update(eos_token_id=3))
    line = machine.refusal(*serve(copy, "--table", daemon_address))
    assert "the daemon's table does not fit the model: EOS" in line


# -- vLLM ----------------------------------------------------------------------------------------------


@contextmanager
def started(machine, tiny_checkpoint, daemon_address, *arguments, **extra) -> Iterator[subprocess.Popen[str]]:
    command = serve(tiny_checkpoint, "--table", daemon_address, "--http-address", "127.0.0.1:0", *arguments)
    with subprocess.Popen(
        # Tests that run in the background of a shell ignore SIGINT, and children inherit that.
        ["env", "--default-signal=INT", *map(str, machine.command(*command))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=machine.environment(**extra),
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def first_words(process: subprocess.Popen[str]) -> dict:
    """What the process says once it is vllm."""
    assert process.stdout is not None
    assert process.stderr is not None
    line = process.stdout.readline()
    assert line, process.stderr.read()
    return json.loads(line)


def test_it_becomes_vllm(machine, deep_checkpoint, daemon_address) -> None:
    arguments = ("--pp", "3", "--disable", "pp_config_gate", "--", "--seed", "7")
    with started(machine, deep_checkpoint, daemon_address, *arguments) as process:
        told = first_words(process)
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=20)
    assert told["pid"] == process.pid, "a process of its own would have to be watched"
    argv = told["argv"]
    assert argv[:2] == ["serve", str(deep_checkpoint)]
    assert argv[-2:] == ["--seed", "7"]
    assert argv[argv.index("--pipeline-parallel-size") + 1] == "3"
    assert argv[argv.index("--max-model-len") + 1] == "32768", "the checkpoint allows no more"
    triplex = json.loads(argv[argv.index("--additional-config") + 1])["triplex"]
    assert triplex["table"] == daemon_address
    assert triplex["disable"] == ["pp_config_gate"]
    assert Path(triplex["wait_file"]).parent.stat().st_mode & 0o777 == 0o700
    assert told["environment"]["VLLM_PP_LAYER_PARTITION"] == "6,7,7"
    assert process.returncode == 40 + signal.SIGTERM
    assert "pipeline layers=6,7,7 table_stage=0 table_layer=1" in log
    assert "table fits" in log


def test_its_exit_status_is_ours(machine, tiny_checkpoint, daemon_address) -> None:
    with started(machine, tiny_checkpoint, daemon_address, FAKE_EXIT="3") as process:
        process.communicate(timeout=60)
    assert process.returncode == 3


def test_nothing_is_left_of_one_that_is_killed(machine, tiny_checkpoint, daemon_address) -> None:
    with started(machine, tiny_checkpoint, daemon_address) as process:
        first_words(process)
        process.kill()
        # Its pipe would stay open in a child that lived on, and this would wait for its end.
        process.communicate(timeout=20)
    assert process.returncode == -signal.SIGKILL


def test_interrupted_while_it_waits(machine, tiny_checkpoint, tmp_path) -> None:
    with started(machine, tiny_checkpoint, f"unix:{tmp_path}/no.sock") as process:
        assert process.stderr is not None
        while "waiting for the table" not in (line := process.stderr.readline()):
            assert line, "it ended early"
        process.send_signal(signal.SIGINT)
        _, rest = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "Traceback" not in rest


def test_without_an_executable(machine, tiny_checkpoint, daemon_address) -> None:
    (machine.folder / "bin/vllm").unlink()
    line = machine.refusal(
        *serve(tiny_checkpoint, "--table", daemon_address, "--http-address", "127.0.0.1:0")
    )
    assert "no vllm in this environment or on PATH" in line


def test_a_run_directory_that_cannot_be_used(machine, tiny_checkpoint, daemon_address) -> None:
    line = machine.refusal(
        *serve(tiny_checkpoint, "--table", daemon_address, "--http-address", "127.0.0.1:0"),
        XDG_RUNTIME_DIR=str(tiny_checkpoint / "config.json"),
    )
    assert f"cannot use the run directory {tiny_checkpoint}/config.json/triplex-" in line
