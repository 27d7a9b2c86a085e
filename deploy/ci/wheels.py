"""Bring the wheels that images need into deploy/wheels, with this machine's pip and its settings."""

import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(CHECKOUT / "deploy/images"))

from install import requirements, split  # noqa: E402 - what an image installs is what is fetched

PROJECTS = ("protos", "services/ple_daemon", "services/gateway", "services/inference[reference]")


def main() -> None:
    if sys.version_info[:2] != (3, 11):
        sys.exit(
            "wheels: the base image has Python 3.11 and .venv has not: make clean, then PYTHON=python3.11"
        )
    asked, alone = split(sorted({line for project in PROJECTS for line in requirements(project)}))
    folder = CHECKOUT / "deploy/wheels"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
    pip += ["--progress-bar", "off", "--only-binary=:all:", "--dest", str(folder)]
    subprocess.run([*pip, "-c", "constraints/cpu.txt", *asked], cwd=CHECKOUT, check=True)
    subprocess.run([*pip, "-c", "constraints/cpu.txt", "--no-deps", *alone], cwd=CHECKOUT, check=True)
    subprocess.run([*pip, "-r", "constraints/build.txt"], cwd=CHECKOUT, check=True)


if __name__ == "__main__":
    main()
