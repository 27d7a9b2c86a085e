"""What cannot be served ends in one clear line and a non-zero status."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ple_inference.checkpoint import read_checkpoint
from ple_inference.reference.serve import ServeError, serve
from ple_inference.settings import SettingsError, load_settings, split_address


def refuse(*arguments: str, **environment: str) -> str:
    """Run `ple-inference`, which must fail, and return its one line."""
    done = subprocess.run(
        [sys.executable, "-m", "ple_inference", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={name: value for name, value in os.environ.items() if not name.startswith("PLE_")} | environment,
    )
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if " INFO " not in line]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("ple-inference: ")
    return lines[0]


@pytest.fixture
def copy(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """The tiny checkpoint's JSON files, to be spoilt."""
    for path in tiny_checkpoint.glob("*.json"):
        shutil.copy(path, tmp_path)
    return tmp_path


def change_config(folder: Path, change: Callable[[dict], object]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def test_no_such_model() -> None:
    assert "no such model folder: /nowhere" in refuse("serve", "--model", "/nowhere")


def test_not_this_architecture(copy: Path) -> None:
    change_config(copy, lambda config: config.update(model_type="llama"))
    assert "not a Qwen4Exp checkpoint: model_type 'llama'" in refuse("serve", "--model", str(copy))


def test_text_model_alone(copy: Path) -> None:
    def keep_text(config: dict) -> None:
        text = config.pop("text_config")
        config.clear()
        config.update(text, model_type="qwen4_exp_text")

    change_config(copy, keep_text)
    assert "is the text model alone (qwen4_exp_text)" in refuse("serve", "--model", str(copy))


def test_without_ple(copy: Path) -> None:
    change_config(copy, lambda config: config["text_config"].update(ple_layer_ids=[]))
    assert "0 n-gram (PLE) layers" in refuse("serve", "--model", str(copy))


@pytest.mark.parametrize("quantization", [{"quant_method": "compressed-tensors"}, {"quant_method": "fp8"}])
def test_quantized_weights(copy: Path, quantization: dict[str, str]) -> None:
    change_config(copy, lambda config: config.update(quantization_config=quantization))
    line = refuse("serve", "--model", str(copy))
    assert f"is quantized ({quantization['quant_method']}); the reference engine computes with" in line


def test_without_tokenizer(copy: Path) -> None:
    (copy / "tokenizer.json").unlink()
    assert "no tokenizer.json" in refuse("serve", "--model", str(copy))


def test_broken_config(copy: Path) -> None:
    (copy / "config.json").write_text("{")
    assert "config.json is not JSON" in refuse("serve", "--model", str(copy))


@pytest.mark.parametrize("layers", [5, [[1]], ["a"], "2"])
def test_strange_ple_layers(copy: Path, layers: object) -> None:
    change_config(copy, lambda config: config["text_config"].update(ple_layer_ids=layers))
    assert "ple_layer_ids is no list of numbers" in refuse("serve", "--model", str(copy))


@pytest.mark.parametrize("changes", [{"vocab_size": "x"}, {"num_hidden_layers": 3}, {"layer_types": 5}])
def test_a_config_that_transformers_refuses(copy: Path, changes: dict[str, object]) -> None:
    """As the command serves, in this process, which has torch and transformers already."""
    change_config(copy, lambda config: config["text_config"].update(changes))
    flags = {"model": copy, "http_address": "127.0.0.1:0"}
    with pytest.raises(ServeError, match=f"^cannot load {copy}: .+") as refused:
        serve(load_settings({}, flags, copy), read_checkpoint(copy))
    assert len(str(refused.value).splitlines()) == 1


def test_a_failed_load_ends_the_command(copy: Path) -> None:
    change_config(copy, lambda config: config["text_config"].update(vocab_size="x"))
    line = refuse("serve", "--model", str(copy), "--http-address", "127.0.0.1:0")
    assert f"cannot load {copy}: " in line


def test_port_taken(tiny_checkpoint: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        line = refuse("serve", "--model", str(tiny_checkpoint), "--http-address", address)
    assert f"cannot listen on {address}" in line


def test_settings_of_the_other_engine(tiny_checkpoint: Path) -> None:
    model = ("serve", "--model", str(tiny_checkpoint))
    assert "profile is no setting of engine reference" in refuse(*model, "--profile", "triple-24gb")
    line = refuse(*model, "--engine", "vllm", PLE_INFERENCE_NUM_THREADS="2")
    assert "num_threads is no setting of engine vllm" in line
    assert "are for --engine vllm" in refuse(*model, "--", "--max-num-seqs", "2")


def test_unknown_and_wrong_settings() -> None:
    assert "unknown setting PLE_INFERENCE_MODLE" in refuse("serve", PLE_INFERENCE_MODLE="x")
    line = refuse("serve", "--model", "/x", PLE_INFERENCE_MAX_NUM_SEQS="none")
    assert "PLE_INFERENCE_MAX_NUM_SEQS is 'none'" in line
    assert "give --model" in refuse("serve")


def test_daemon_that_never_comes(tiny_checkpoint: Path, tmp_path: Path) -> None:
    line = refuse(
        "serve",
        *("--model", str(tiny_checkpoint), "--table", f"unix:{tmp_path}/no.sock"),
        *("--http-address", "127.0.0.1:0"),
        PLE_INFERENCE_TABLE_WAIT_DEADLINE_S="1",
    )
    assert "no answer from unix:" in line


def test_socket_path_too_long(tiny_checkpoint: Path) -> None:
    address = f"unix:/tmp/{'x' * 120}/table.sock"
    assert "a Unix socket takes 107" in refuse("serve", "--model", str(tiny_checkpoint), "--table", address)


def test_tiny_options_are_checked(tmp_path: Path) -> None:
    assert "--layers is 3" in refuse("tiny", str(tmp_path / "x"), "--layers", "3")


def test_help_needs_no_torch() -> None:
    code = "import sys; sys.argv = ['x', 'serve', '--help']; sys.modules['torch'] = None\n"
    code += "from ple_inference.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "prefill_chunk_tokens" in done.stdout


def test_injected_names_are_no_settings(tmp_path: Path) -> None:
    environment = {"PLE_INFERENCE_PORT": "tcp://1", "PLE_INFERENCE_SERVICE_HOST": "x"}
    settings = load_settings(environment, {"model": tmp_path / "m"}, tmp_path)
    assert settings.model_name == "m"
    assert settings.table_address.endswith("/table.sock")


def test_flags_come_before_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PLE_INFERENCE_MAX_NUM_SEQS", "7")
    environment = {"PLE_INFERENCE_MAX_NUM_SEQS": "7"}
    flags = {"model": tmp_path, "max_num_seqs": None}
    assert load_settings(environment, flags, tmp_path).max_num_seqs == 7
    assert load_settings(environment, flags | {"max_num_seqs": 2}, tmp_path).max_num_seqs == 2
    with pytest.raises(SettingsError, match="MAX_NUM_SEQS is 0"):
        load_settings(environment, flags | {"max_num_seqs": 0}, tmp_path)


@pytest.mark.parametrize("address", ["8100", ":8100", "host:", "host:port", "host:65536"])
def test_bad_addresses(address: str) -> None:
    with pytest.raises(ValueError, match="host:port"):
        split_address(address)
