"""Each distribution builds a wheel that installs alone into a clean environment and imports."""

import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
DISTRIBUTIONS = {
    "ple_rpc": CHECKOUT / "protos",
    "ple_daemon": CHECKOUT / "services/ple_daemon",
    "ple_inference": CHECKOUT / "services/inference",
    "ple_gateway": CHECKOUT / "services/gateway",
}
HEAVY = ("torch", "transformers", "vllm", "xgrammar", "triton")

pytestmark = pytest.mark.packaging


def run(*command: object) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="session")
def wheels(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("wheels")
    for project in DISTRIBUTIONS.values():
        run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", out, project)
    return out


def wheel_of(wheels: Path, name: str) -> Path:
    (found,) = wheels.glob(f"{name}-*.whl")
    return found


def test_versions_are_equal_and_pinned_to_each_other():
    versions = {}
    for name, project in DISTRIBUTIONS.items():
        content = tomllib.loads((project / "pyproject.toml").read_text())["project"]
        versions[name] = content["version"]
        init = next(project.rglob(f"{name}/__init__.py")).read_text()
        assert f'__version__ = "{content["version"]}"' in init
        pins = [d for d in content["dependencies"] if d.startswith("ple-rpc")]
        assert pins == ([f"ple-rpc=={content['version']}"] if name in ("ple_daemon", "ple_inference") else [])
    assert len(set(versions.values())) == 1


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_a_wheel_holds_its_package_and_nothing_else(wheels, name):
    project = DISTRIBUTIONS[name]
    source = next(project.rglob(f"{name}/__init__.py")).parent
    tracked = run("git", "-C", CHECKOUT, "ls-files", source.relative_to(CHECKOUT)).split()
    expected = {Path(path).relative_to(source.parent.relative_to(CHECKOUT)).as_posix() for path in tracked}
    with zipfile.ZipFile(wheel_of(wheels, name)) as wheel:
        held = {entry for entry in wheel.namelist() if ".dist-info/" not in entry}
    assert held == expected


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_a_wheel_installs_alone_and_imports(wheels, name, tmp_path):
    """Daemon, gateway and contract come without torch; inference without an extra still shows its help."""
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env/bin/python"
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)
    constraints = ("-c", CHECKOUT / "constraints/cpu.txt")
    run(
        *(*pip, "install", "--quiet", "--no-compile", "--find-links", wheels, *constraints),
        wheel_of(wheels, name),
    )
    run(python, "-I", "-c", f"import {name}; print({name}.__version__)")
    installed = run(*pip, "list", "--format=freeze")
    names = {re.split("==", line)[0].lower() for line in installed.split()}
    assert names.isdisjoint(HEAVY)
    if name != "ple_rpc":
        command = tmp_path / "env/bin" / name.replace("_", "-")
        assert "serve" in run(command, "--help")
