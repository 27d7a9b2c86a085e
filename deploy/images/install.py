"""Fill /opt/triplex, the environment of an image, from the lock and from this checkout.

    python3 install.py tools                              pip and a build backend, in a stage of their own
    python3 install.py wheels protos services/gateway     our distributions, into /dist
    python3 install.py dependencies constraints/cpu.txt services/gateway      what others wrote
    python3 install.py projects                           what lies in /dist

The last two write layers of the final image, with tools that are only mounted there. A change of our code
leaves the layer with the dependencies, which is the large one, as it was. "PROJECT[EXTRA]" adds an extra.
Wheels in /wheels are found beside those of the index.
"""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

BUILD = Path("/opt/build")
TARGET = Path("/opt/triplex")
DIST = Path("/dist")
PIP = (str(BUILD / "bin/python"), "-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet")
# Not compiled here: importing the service compiles what it uses of the thousands of modules.
OPTIONS = ("--progress-bar", "off", "--find-links", "/wheels")
INSTALL = ("--python", str(TARGET / "bin/python"), "install", *OPTIONS, "--no-compile", "--no-cache-dir")
# 690 MB that xgrammar asks for and imports for GPUs only.
UNUSED = {"triton"}


def main() -> None:
    step, *arguments = sys.argv[1:]
    steps = {"tools": tools, "wheels": wheels, "dependencies": dependencies, "projects": projects}
    steps[step](*arguments)


def tools() -> None:
    """Make an environment with pip and the build backend."""
    run(sys.executable, "-m", "venv", str(BUILD))
    run(*PIP, "install", *OPTIONS, "--no-compile", "--no-cache-dir", "-r", "constraints/build.txt")


def wheels(*folders: str) -> None:
    """Build our own distributions."""
    asked = [f"./{folder}" for folder in folders]
    run(*PIP, "wheel", *OPTIONS, "--no-deps", "--no-build-isolation", "--wheel-dir", str(DIST), *asked)


def dependencies(lock: str, *asked: str) -> None:
    """Make the environment and install what projects ask for, in the versions of `lock`."""
    run(sys.executable, "-m", "venv", "--without-pip", str(TARGET))
    wanted = [line for project in asked for line in requirements(project)]
    resolve = (*PIP, *INSTALL, "--dry-run", "--report", "-", "-c", lock, *wanted)
    found = json.loads(subprocess.run(resolve, check=True, stdout=subprocess.PIPE).stdout)["install"]
    chosen = {each["metadata"]["name"]: each["metadata"]["version"] for each in found}
    run(*PIP, *INSTALL, "--no-deps", *(f"{n}=={v}" for n, v in chosen.items() if n not in UNUSED))


def projects() -> None:
    """Install our own distributions; what they need is there already."""
    run(*PIP, *INSTALL, "--no-deps", *map(str, DIST.glob("*.whl")))


def requirements(asked: str) -> list[str]:
    """What a project asks for, without our own distributions."""
    folder, _, extra = asked.removesuffix("]").partition("[")
    content = tomllib.loads((Path(folder) / "pyproject.toml").read_text())["project"]
    wanted = content["dependencies"] + (content["optional-dependencies"][extra] if extra else [])
    return [requirement for requirement in wanted if not requirement.startswith("ple-rpc")]


def run(*command: str) -> None:
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
