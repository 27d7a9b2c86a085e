"""Stand-ins for what is compiled, and a platform with an sm_86, on a machine without a GPU.

Import this before anything of vllm: its modules bind the platform by name when they are imported. Nothing
that is absent is ever called: no forward runs.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

COMPILED = ("_C", "_moe_C", "_C_stable_libtorch", "_moe_C_stable_libtorch", "vllm_flash_attn._vllm_fa2_C")
TORCHVISION = (
    "io",
    "ops",
    "transforms",
    "transforms.functional",
    "transforms.v2",
    "transforms.v2.functional",
)


class Nothing:
    """Answers for what is made or imported, and not used."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return Nothing()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return Nothing()


def _absent(name: str) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    module.__path__ = []  # type: ignore[attr-defined]
    module.__version__ = "0"  # type: ignore[attr-defined]
    sys.modules[name] = module
    parent, _, leaf = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], leaf, module)
    return module


def _missing(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return Nothing


def _install() -> None:
    torch.set_num_threads(1)
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # it asks for Triton otherwise
    for name in COMPILED:
        _absent(f"vllm.{name}")
    for name in ("torchvision", *(f"torchvision.{part}" for part in TORCHVISION)):
        _absent(name).__getattr__ = _missing  # type: ignore[method-assign]
    sys.modules["torchvision.transforms"].InterpolationMode = Nothing()  # type: ignore[attr-defined]
    import_module("vllm.platforms")._current_platform = _card()
    operations = import_module("vllm._custom_ops")
    for name in dir(operations):
        if name.startswith("cutlass") and "support" in name:
            setattr(operations, name, lambda *_: False)


def _card() -> Any:
    capability = import_module("vllm.platforms.interface").DeviceCapability(8, 6)
    answers = {
        "get_device_capability": classmethod(lambda cls, device_id=0: capability),
        "get_device_name": classmethod(lambda cls, device_id=0: "card"),
        "get_device_total_memory": classmethod(lambda cls, device_id=0: 24 << 30),
        "current_device": classmethod(lambda cls: torch.device("cpu")),
        "log_warnings": classmethod(lambda cls: None),
    }
    return type("Card", (import_module("vllm.platforms.cuda").CudaPlatformBase,), answers)()


_install()
