"""Fill /opt/triplex, the environment of an image, from the lock and from this checkout.

    python3 install.py tools                              pip and a build backend, in a stage of their own
    python3 install.py wheels protos services/gateway     our distributions, into /dist
    python3 install.py dependencies constraints/cpu.txt services/gateway      what others wrote
    python3 install.py projects                           what lies in /dist

The last two write layers of the final image, with tools that are only mounted there. A change of our code
leaves the layer with the dependencies, which is the large one, as it was. "PROJECT[EXTRA]" adds an extra.
Wheels in /wheels are found beside those of the index.
"""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

BUILD = Path("/opt/build")
TARGET = Path("/opt/triplex")
DIST = Path("/dist")
PIP = (str(BUILD / "bin/python"), "-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet")
# Not compiled here: importing the service compiles what it uses of the thousands of modules.
OPTIONS = ("--progress-bar", "off", "--find-links", "/wheels")
INSTALL = ("--python", str(TARGET / "bin/python"), "install", *OPTIONS, "--no-compile", "--no-cache-dir")
# It asks for triton too, 690 MB that it imports for GPUs only: what it needs is named here.
ALONE, ITS_OWN = "xgrammar", ("apache-tvm-ffi",)


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
    wanted, alone = split(line for project in asked for line in requirements(project))
    run(*PIP, *INSTALL, "-c", lock, *wanted)
    if alone:
        run(*PIP, *INSTALL, "--no-deps", "-c", lock, *alone)


def split(wanted: Iterable[str]) -> tuple[list[str], list[str]]:
    """What is installed with all that it asks for, and what is installed alone."""
    lines = list(wanted)
    alone = [line for line in lines if re.match(rf"{ALONE}\b", line)]
    return [line for line in lines if line not in alone] + list(ITS_OWN if alone else ()), alone


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
