"""Write both locks anew from what the projects ask for: `make lock`.

cpu.txt is the environment of daemon, gateway, reference engine and tests; vllm.txt the one of inference on
GPUs, where vLLM 0.33.0's pins decide. A lock here is a file of constraints: it installs nothing by itself.
"""

import subprocess
import sys
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
CHECKOUT = HERE.parent
PROJECTS = ("protos", "services/ple_daemon", "services/inference", "services/gateway")
OLDEST_PYTHON = "3.11"


def requirements(project: str, *extras: str) -> list[str]:
    """What a distribution asks for, without our own distributions."""
    content = tomllib.loads((CHECKOUT / project / "pyproject.toml").read_text())["project"]
    asked = list(content["dependencies"])
    for extra in extras:
        asked += content["optional-dependencies"][extra]
    return [requirement for requirement in asked if not requirement.startswith("ple-rpc")]


def development() -> list[str]:
    content = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
    return list(content["dependency-groups"]["dev"])


def lock(name: str, what: str, asked: list[str]) -> None:
    """Resolve for every admitted Python at once and write `name`."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "-", "--universal", "--no-header"]
    command += ["--fork-strategy", "fewest"]
    command += ["--no-annotate", "--quiet", "--python-version", OLDEST_PYTHON]
    resolved = subprocess.run(command, input="\n".join(asked), text=True, stdout=subprocess.PIPE, check=True)
    header = f"# Exact versions for {what}, CPython 3.11 to 3.13. Made by `make lock`.\n"
    (HERE / name).write_text(header + resolved.stdout)


def main() -> None:
    cpu = [line for project in PROJECTS for line in requirements(project)]
    cpu += requirements("services/inference", "reference") + development()
    lock("cpu.txt", "daemon, gateway, reference engine and tests", cpu)
    gpu = [*requirements("protos"), *requirements("services/inference", "vllm")]
    lock("vllm.txt", "inference on GPUs", gpu)


if __name__ == "__main__":
    main()
