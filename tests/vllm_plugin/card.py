"""vLLM's model and loaders on a machine without a GPU, told that it has an sm_86.

What is compiled is absent and never called: no forward runs. Import this before anything of vllm.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

COMPILED = ("_C", "_moe_C", "_C_stable_libtorch", "_moe_C_stable_libtorch", "vllm_flash_attn._vllm_fa2_C")
TORCHVISION = ("io", "ops", "transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional")


class Nothing:
    """Answers for what is imported and not used."""

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


torch.set_num_threads(1)
for name in COMPILED:
    _absent(f"vllm.{name}")
for name in ("torchvision", *(f"torchvision.{part}" for part in TORCHVISION)):
    _absent(name).__getattr__ = _missing  # type: ignore[method-assign]
sys.modules["torchvision.transforms"].InterpolationMode = Nothing()  # type: ignore[attr-defined]

from vllm import platforms
from vllm.platforms.cuda import CudaPlatformBase
from vllm.platforms.interface import DeviceCapability


class Card(CudaPlatformBase):
    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
        return DeviceCapability(8, 6)

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return "card"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return 24 << 30

    @classmethod
    def current_device(cls) -> torch.device:  # type: ignore[override]
        return torch.device("cpu")

    @classmethod
    def log_warnings(cls) -> None: ...


platforms._current_platform = Card()  # vllm's modules bind it by name when they are imported

from vllm import _custom_ops

for name in dir(_custom_ops):
    if name.startswith("cutlass") and "support" in name:
        setattr(_custom_ops, name, lambda *_: False)

from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.kernels.linear.mixed_precision import humming
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import registry
from vllm.models.qwen4_exp.nvidia import model, qsa  # model first: they import each other
from vllm.utils import import_utils
from vllm.utils.torch_utils import set_default_torch_dtype

humming.has_humming = import_utils.has_humming = lambda: True
qsa.is_flash_attn_varlen_func_available = lambda: True
torch.cuda.Stream = torch.cuda.Event = Nothing  # type: ignore[misc, assignment]
torch.ops._C = Nothing()  # layers bind compiled functions when they are made
# Upstream looks at a model class in another process, which knows nothing of the above.
registry._LazyRegisteredModel.inspect_model_cls = lambda model: registry._ModelInfo.from_model_cls(
    model.load_model_cls()
)


def engine_config(folder: str) -> Any:
    arguments = EngineArgs(
        model=folder,
        skip_tokenizer_init=True,
        max_model_len=512,
        max_num_batched_tokens=64,
        enforce_eager=True,
        limit_mm_per_prompt={"image": 1, "video": 0},
    )
    config = arguments.create_engine_config()
    config.engram_config.cpu_offload = False  # pinned memory is CUDA's
    return config


def start(config: Any) -> None:
    """One process that is a whole distributed group."""
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(
            world_size=1, rank=0, distributed_init_method="file:///dev/shm/card-group", local_rank=0, backend="gloo"
        )
        parallel_state.initialize_model_parallel(1, 1)


@contextmanager
def pipeline(rank: int, stages: int) -> Any:
    """As if this process were one of several stages."""
    whole = parallel_state._PP
    parallel_state._PP = SimpleNamespace(
        rank=rank,
        rank_in_group=rank,
        world_size=stages,
        is_first_rank=rank == 0,
        is_last_rank=rank == stages - 1,
    )
    try:
        yield
    finally:
        parallel_state._PP = whole


def build(config: Any) -> Any:
    config.compilation_config.static_forward_context.clear()
    with set_default_torch_dtype(torch.bfloat16):
        return initialize_model(config)
