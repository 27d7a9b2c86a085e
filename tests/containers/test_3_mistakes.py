"""Mistakes of a first installation give one clear line; the GPU file is as strict as the one that runs."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
SERVICES = ("daemon", "inference", "gateway")
STRICT = (
    "user",
    "cap_drop",
    "cap_add",
    "read_only",
    "security_opt",
    "networks",
    "init",
    "restart",
    "logging",
)


def run_image(image: str, *options: str) -> tuple[int, list[str]]:
    """Start one container as compose would; its exit status and the lines that it wrote."""
    strict = ("--rm", "--network", "none", "--read-only", "--cap-drop", "ALL", "--tmpfs", "/tmp")
    # Where compose mounts the volume of compiled kernels.
    strict += ("--tmpfs", "/var/cache/ple-daemon:uid=10001,gid=10000,mode=0700")
    command = ["docker", "run", *strict, *options, f"triplex/{image}:latest"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return done.returncode, (done.stdout + done.stderr).strip().splitlines()


@pytest.mark.parametrize(
    ("image", "options", "said"),
    [
        (
            "ple-daemon",
            (
                "-e",
                "PLE_DAEMON_TABLE=/table/table.ple",
                "--tmpfs",
                "/run/triplex:uid=10001,gid=10000,mode=2750",
            ),
            "/table/table.ple: does not exist",
        ),
        (
            "ple-daemon",
            ("-e", "PLE_DAEMON_TABLE=/table", "--tmpfs", "/run/triplex:uid=4711,mode=0755"),
            "run directory /run/triplex: belongs to another user",
        ),
        ("ple-inference", (), "no model; give --model or PLE_INFERENCE_MODEL"),
        ("ple-inference", ("-e", "PLE_INFERENCE_MODEL=/models/none"), "/models/none"),
        (
            "ple-gateway",
            ("-e", "PLE_GATEWAY_API_KEYS_FILE=/run/secrets/api_keys"),
            "api_keys_file /run/secrets/api_keys cannot be read",
        ),
        (
            "ple-gateway",
            ("-e", "PLE_GATEWAY_HTTP_ADDRESS=0.0.0.0:8000"),
            "no API key is set",
        ),
    ],
    ids=["no_table", "run_dir_owner", "no_model", "model_is_gone", "no_key_file", "no_keys"],
)
def test_a_mistake_is_told_in_one_line(image, options, said):
    status, lines = run_image(image, *options)
    assert status != 0
    assert said in lines[-1]
    # The daemon logs its settings first; nobody prints a stack.
    assert len(lines) <= 3, lines
    assert not any("Traceback" in line for line in lines)


def test_an_empty_file_of_keys_is_told_in_one_line(tmp_path):
    keys = tmp_path / "api_keys"
    keys.touch(0o644)
    status, lines = run_image(
        "ple-gateway",
        *("--volume", f"{keys}:/run/secrets/api_keys:ro"),
        *("--env", "PLE_GATEWAY_API_KEYS_FILE=/run/secrets/api_keys"),
    )
    assert status != 0
    assert "api_keys_file /run/secrets/api_keys holds no key; put one in" in lines[-1]


def make_up(*options: str, **values: str) -> list[str]:
    """What `make up` says when it refuses to start; it builds and starts nothing before."""
    done = subprocess.run(
        [sys.executable, str(DEPLOY / "stack.py"), "up", *options],
        env=os.environ | values,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("triplex: ")
    return done.stderr.splitlines()


def test_make_up_says_that_a_port_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        (line,) = make_up("--cpu", TRIPLEX_ADDRESS=address)
    assert line == (
        f"triplex: {address} cannot be listened on (Address already in use): "
        "choose another with TRIPLEX_ADDRESS=HOST:PORT"
    )


def test_make_up_says_that_keys_are_missing(tmp_path, free_address):
    keys = tmp_path / "api_keys"
    values = {"TRIPLEX_ADDRESS": free_address, "TRIPLEX_API_KEYS_FILE": str(keys)}
    (line,) = make_up("--cpu", **values)
    assert line.startswith(f"triplex: no file {keys}: TRIPLEX_API_KEYS_FILE must name a file with API keys")
    keys.write_text("\n")
    (line,) = make_up("--cpu", **values)
    assert line.startswith(f"triplex: {keys} holds no key: TRIPLEX_API_KEYS_FILE must name a file with")


def test_make_up_says_what_a_gpu_needs(tmp_path):
    """One thing after the other: a value, a folder, NVIDIA's runtime, which this engine does not have."""
    (line,) = make_up("--gpu")
    assert re.search(r"required variable TRIPLEX_[A-Z_]+ is missing a value: (name|bound) ", line)
    values = {
        "TRIPLEX_TABLE": str(tmp_path / "table"),
        "TRIPLEX_MODEL": str(tmp_path),
        "TRIPLEX_PROFILE": "triple-24gb",
        "TRIPLEX_INFERENCE_MEMORY": "24g",
    }
    (line,) = make_up("--gpu", **values)
    assert line == f"triplex: no {tmp_path}/table: daemon has it mounted as /table"
    (line,) = make_up("--gpu", **values | {"TRIPLEX_TABLE": str(tmp_path)})
    assert line.startswith("triplex: the container engine has no nvidia runtime: install nvidia-container-")


@pytest.fixture
def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


def read_compose(name: str, *options: str) -> dict:
    command = ["docker", "compose", *options, "-f", str(DEPLOY / name), "config", "--format", "json"]
    return json.loads(subprocess.check_output(command, text=True, timeout=60))["services"]


def test_the_gpu_file_is_as_strict_as_the_one_that_ran():
    gpu, cpu = (
        read_compose("compose.yaml", "--env-file", str(DEPLOY / "3x3090.env")),
        read_compose("compose.cpu.yaml"),
    )
    for service in SERVICES:
        for what in STRICT:
            assert gpu[service].get(what) == cpu[service].get(what), (service, what)
    for services in (gpu, cpu):
        assert services["daemon"]["cap_add"] == ["SYS_PTRACE"]
        assert [name for name in SERVICES if services[name].get("cap_add")] == ["daemon"]
        assert [name for name in SERVICES if services[name].get("mem_limit")] == ["inference"]
        assert [name for name in SERVICES if services[name].get("ports")] == ["gateway"]
        assert services["gateway"]["ports"][0]["host_ip"] == "127.0.0.1"
    assert gpu["inference"]["ulimits"] == {"memlock": -1}
    assert "depends_on" not in gpu["inference"]
    assert "depends_on" not in gpu["gateway"]


def test_a_missing_value_is_named():
    command = ["docker", "compose", "-f", str(DEPLOY / "compose.yaml"), "config", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    # Compose names whichever it meets first.
    assert re.search(r"required variable TRIPLEX_[A-Z_]+ is missing a value: (name|bound) ", done.stderr)
