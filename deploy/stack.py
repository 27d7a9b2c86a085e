"""Start or stop the three services in containers: `make up` and `make down`.

    python3 deploy/stack.py up                                     a GPU decides which file it is
    python3 deploy/stack.py up --gpu --env-file deploy/3x3090.env
    python3 deploy/stack.py down

It needs Docker with compose v2 (tested: 2.26), and nothing of this checkout's environment. The first `up`
makes an API key, shows it once, and keeps its hash in deploy/secrets/api_keys.
"""

import argparse
import hashlib
import secrets
import shutil
import subprocess
import sys
from pathlib import Path

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
        if gpu:
            check_gpu_runtime()
        check_env_file(options.env_file)
        make_key()
        return subprocess.run([*words, "up", "--detach", "--build", "--wait"], check=False).returncode
    except StackError as error:
        print(f"triplex: {error}", file=sys.stderr)
        return 1


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


def make_key() -> None:
    """Keep the hash of a new key where there is none. Raises StackError."""
    if KEYS.is_dir():
        # What Docker makes of a file that it is to mount and cannot find.
        raise StackError(f"{KEYS} is a folder: remove it, then a key is made")
    if KEYS.exists():
        return
    key = f"sk-{secrets.token_urlsafe(32)}"
    KEYS.parent.mkdir(exist_ok=True)
    KEYS.write_text(f"sha256:{hashlib.sha256(key.encode()).hexdigest()}\n")
    # The gateway's user must read it, and nobody can use what is in it.
    KEYS.chmod(0o644)
    print(f"triplex: a new API key, shown this once: {key}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
