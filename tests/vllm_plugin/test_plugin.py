"""The entry point: cheap to load, and never silently absent."""

import logging
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ple_inference.vllm_plugin import plugin

CHECKOUT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "vllm", "transformers", "numpy", "grpc", "pydantic", "fastapi")


def test_the_entry_point_is_declared():
    project = tomllib.loads((CHECKOUT / "services/inference/pyproject.toml").read_text())["project"]
    assert project["entry-points"] == {
        "vllm.general_plugins": {"triplex": "ple_inference.vllm_plugin.plugin:register"}
    }


@pytest.mark.parametrize("module", ["plugin", "overrides", "proof", "switches", "catalogue"])
def test_importing_it_imports_nothing_heavy(module):
    script = f"import sys, ple_inference.vllm_plugin.{module}; print(*sys.modules)"
    imported = subprocess.check_output([sys.executable, "-c", script], text=True, timeout=60)
    assert set(imported.split()).isdisjoint(HEAVY)


def test_without_vllm_it_fails_loudly():
    """vLLM lets an error of the called function end its start."""
    with pytest.raises(ModuleNotFoundError, match="vllm"):
        plugin.register()


def test_vllm_calls_it_outside_its_try(upstream, monkeypatch):
    """Upstream's own loader: an error of `register` comes through."""
    module = upstream(
        "vllm.plugins",
        "load_plugins_by_group",
        "load_general_plugins",
        "DEFAULT_PLUGINS_GROUP",
        "plugins_loaded",
        Any=Any,
        Callable=Callable,
        envs=SimpleNamespace(VLLM_PLUGINS=None),
        logger=logging.getLogger("upstream"),
    )

    point = SimpleNamespace(name="triplex", value="", load=lambda: plugin.register)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [point])
    with pytest.raises(ModuleNotFoundError, match=r"vllm\.model_executor"):
        module.load_general_plugins()
