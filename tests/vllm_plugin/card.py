"""vLLM's model built and loaded on a machine without a GPU, as rank of a pipeline that is not there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import sm86
import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.kernels.linear.mixed_precision import humming
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import registry
from vllm.models.qwen4_exp.nvidia import model, qsa  # in this order: they import each other
from vllm.utils import import_utils
from vllm.utils.torch_utils import set_default_torch_dtype

MODELS = (model.Qwen4ExpForCausalLM, model.Qwen4ExpForConditionalGeneration)

humming.has_humming = import_utils.has_humming = lambda: True
qsa.is_flash_attn_varlen_func_available = lambda: True
# Layers make streams and bind compiled functions.
torch.cuda.Stream = torch.cuda.Event = sm86.Nothing  # type: ignore[misc, assignment]
torch.ops._C = sm86.Nothing()
# Upstream looks at a model class in another process, which knows nothing of the above.
registry._LazyRegisteredModel.inspect_model_cls = lambda entry: registry._ModelInfo.from_model_cls(
    entry.load_model_cls()
)


def engine_config(folder: str, images: int = 1) -> Any:
    arguments = EngineArgs(
        model=folder,
        skip_tokenizer_init=True,
        max_model_len=512,
        max_num_batched_tokens=64,
        enforce_eager=True,
        limit_mm_per_prompt={"image": images, "video": 0},
    )
    config = arguments.create_engine_config()
    config.engram_config.cpu_offload = False  # pinned memory is CUDA's
    return config


def start(config: Any) -> None:
    """One process that is a whole distributed group."""
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(
            world_size=1,
            rank=0,
            distributed_init_method="file:///dev/shm/card-group",
            local_rank=0,
            backend="gloo",
        )
        parallel_state.initialize_model_parallel(1, 1)


@contextmanager
def pipeline(rank: int, stages: int) -> Iterator[None]:
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
