"""systemd's own opinion of deploy/systemd, where systemd-analyze is installed; systemd need not run."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

UNITS = sorted((Path(__file__).parents[2] / "deploy/systemd").glob("*.service"))
# systemd's scale ends at 10. Inference is the highest: GPUs are devices, and torch writes code that it runs.
EXPOSURE = {"ple-daemon": 1.7, "ple-gateway": 1.7, "ple-inference": 3.3}

pytestmark = pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd-analyze here")


def analyze(*words: str) -> str:
    done = subprocess.run(["systemd-analyze", *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_nothing_is_found_in_the_units(tmp_path):
    """Verified with a program that is there in the place of each service's own."""
    for unit in UNITS:
        text = re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", unit.read_text(), flags=re.MULTILINE)
        (tmp_path / unit.name).write_text(text)
    said = analyze("verify", *(str(tmp_path / unit.name) for unit in UNITS))
    assert said == ""


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_exposure_does_not_grow(unit):
    found = re.search(
        r"Overall exposure level for \S+: ([\d.]+)", analyze("security", "--offline=true", unit)
    )
    assert found
    assert float(found[1]) <= EXPOSURE[unit.stem]


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_no_unit_has_a_capability(unit):
    assert "CapabilityBoundingSet=\n" in unit.read_text()
    assert "NoNewPrivileges=yes\n" in unit.read_text()
