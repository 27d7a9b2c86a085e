"""Start or stop the three services in containers: `make up` and `make down`.

    python3 deploy/stack.py up                                     a GPU decides which file it is
    python3 deploy/stack.py up --gpu --env-file deploy/3x3090.env
    python3 deploy/stack.py down

It needs Docker with compose v2 (tested: 2.26), and nothing of this checkout's environment. The first `up`
makes an API key, shows it once, and keeps its hash in deploy/secrets/api_keys.
"""

import argparse
import errno
import hashlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
CPU, GPU = HERE / "compose.cpu.yaml", HERE / "compose.yaml"
KEYS = HERE / "secrets/api_keys"


class StackError(Exception):
    """Something that the user must mend; its text is one line."""


def main() -> int:
    options = parse_arguments()
    try:
        check_docker()
        gpu = options.gpu or (not options.cpu and has_gpu())
        words = ["docker", "compose", "-f", str(GPU if gpu else CPU)]
        if options.env_file:
            words += ["--env-file", str(options.env_file)]
        if options.action == "down":
            return subprocess.run([*words, "down"], check=False).returncode
        print(f"triplex: {'GPUs' if gpu else 'no GPU: the tiny model on CPUs'} ({words[3]})", flush=True)
        check_env_file(options.env_file)
        config = read_config(words)
        check_folders(config)
        if gpu:
            check_gpu_runtime()
        check_port(words, config)
        check_keys(Path(config["secrets"]["api_keys"]["file"]))
        return subprocess.run([*words, "up", "--detach", "--build", "--wait"], check=False).returncode
    except (StackError, OSError, subprocess.TimeoutExpired) as error:
        print(f"triplex: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("up", "down"))
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--cpu", action="store_true", help="the tiny model, also where there is a GPU")
    kind.add_argument("--gpu", action="store_true", help="vLLM, also where nvidia-smi finds no GPU")
    parser.add_argument("--env-file", type=Path, help="values of the compose file, such as deploy/3x3090.env")
    return parser.parse_args()


def answers(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, timeout=30, check=False).returncode == 0


def check_docker() -> None:
    """Raises StackError."""
    if not shutil.which("docker"):
        raise StackError("there is no docker: install Docker Engine and its compose plugin")
    if not answers("docker", "compose", "version"):
        raise StackError("docker has no compose plugin: install version 2 of it")
    if not answers("docker", "version"):
        raise StackError("the container engine does not answer: start it, or join the group docker")


def has_gpu() -> bool:
    return bool(shutil.which("nvidia-smi")) and answers("nvidia-smi", "-L")


def check_gpu_runtime() -> None:
    """Raises StackError."""
    info = subprocess.run(
        ["docker", "info", "-f", "{{json .Runtimes}}"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    if "nvidia" not in info.stdout:
        raise StackError(
            "the container engine has no nvidia runtime: install nvidia-container-toolkit, then "
            "nvidia-ctk runtime configure --runtime=docker, and restart the engine"
        )


def check_env_file(path: Path | None) -> None:
    """Raises StackError."""
    if path is not None and not path.is_file():
        raise StackError(f"no file {path}: deploy/3x3090.env is an example")


def read_config(words: list[str]) -> dict[str, Any]:
    """The compose file with its values in place. Raises StackError."""
    done = subprocess.run(
        [*words, "config", "--format", "json"], capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode:
        raise StackError(done.stderr.strip().splitlines()[-1])
    config: dict[str, Any] = json.loads(done.stdout)
    return config


def check_folders(config: dict[str, Any]) -> None:
    """Whether what is to be mounted is there: compose says so only after building. Raises StackError."""
    for name, service in config["services"].items():
        for volume in service.get("volumes", []):
            if volume["type"] == "bind" and not Path(volume["source"]).exists():
                raise StackError(f"no {volume['source']}: {name} has it mounted as {volume['target']}")


def check_port(words: list[str], config: dict[str, Any]) -> None:
    """Whether the gateway's port is free, or its own. Raises StackError."""
    (port,) = config["services"]["gateway"]["ports"]
    host, published = port.get("host_ip", "0.0.0.0"), port.get("published", "")
    if not published.isdecimal():
        raise StackError(f"TRIPLEX_ADDRESS names the port {published!r}: it must be HOST:PORT, with one port")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, int(published)), family=family):
            return
    except OSError as error:
        if error.errno not in {errno.EADDRINUSE, errno.EADDRNOTAVAIL} or is_running(words, "gateway"):
            return  # the engine may bind what we may not
        raise StackError(
            f"{host}:{published} cannot be listened on ({os.strerror(error.errno)}): "
            "choose another with TRIPLEX_ADDRESS=HOST:PORT"
        ) from error


def is_running(words: list[str], service: str) -> bool:
    done = subprocess.run([*words, "ps", "-q", service], capture_output=True, timeout=60, check=False)
    return bool(done.stdout.strip())


def check_keys(file: Path) -> None:
    """Whether there is a key; in the usual file one is made. Raises StackError."""
    usual = os.path.realpath(file) == os.path.realpath(KEYS)
    mend = (
        "remove it, then a key is made"
        if usual
        else "TRIPLEX_API_KEYS_FILE must name a file with API keys, one a line, which `ple-gateway key` makes"
    )
    if file.is_dir():
        # What Docker makes of a file that it is to mount and cannot find.
        raise StackError(f"{file} is a folder: {mend}")
    if usual and not file.exists():
        make_key()
    elif not file.is_file():
        raise StackError(f"no file {file}: {mend}")
    elif not read_keys(file).strip():
        raise StackError(f"{file} holds no key: {mend}")


def read_keys(file: Path) -> str:
    """Raises StackError."""
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StackError(f"{file} cannot be read: {error}") from error


def make_key() -> None:
    """Show a new key once, and keep its hash. Raises StackError."""
    key = f"sk-{secrets.token_urlsafe(32)}"
    try:
        KEYS.parent.mkdir(exist_ok=True)
        with KEYS.open("x") as file:
            file.write(f"sha256:{hashlib.sha256(key.encode()).hexdigest()}\n")
        # The gateway's user must read it, and nobody can use what is in it.
        KEYS.chmod(0o644)
    except OSError as error:
        # Also where another `make up` was faster: its key is the one that counts.
        raise StackError(f"cannot make {KEYS} ({error.strerror}): mend that, then try again") from error
    print(f"triplex: a new API key, shown this once: {key}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
