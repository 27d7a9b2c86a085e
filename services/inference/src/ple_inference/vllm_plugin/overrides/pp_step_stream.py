"""Settle the CUDA stream of the worker's steps before anything remembers it."""

from __future__ import annotations

from ple_inference.vllm_plugin.override import WORKER, Override, Upstream


def install() -> None:
    """In the thread that computes steps: vLLM's first look for its stream makes one, and switches to it."""
    from vllm.utils.torch_utils import current_stream

    current_stream()


def is_live() -> bool:
    import torch
    from vllm.utils import torch_utils

    settled = getattr(torch_utils._current_stream_tls, "value", None)
    return settled is not None and settled == torch.cuda.current_stream()


OVERRIDE = Override(
    name="pp_step_stream",
    summary="the stream of the steps is settled before the exchange of sampled tokens remembers it",
    why="vLLM's current_stream() makes a stream at its first call and switches the thread to it. PPHandler "
    "remembers the thread's stream when it is made; where that call comes later, all that it orders comes "
    "after a stream without work. PyNccl's warm-up makes the call in time, unless NCCL is older than vLLM "
    "wants, VLLM_DISABLE_PYNCCL is set, or the library cannot be loaded.",
    without_it="Where PyNccl is not in use, stages send sampled tokens before they are there and read them "
    "before they have come: the first stage computes with whatever the memory held, and dies of an illegal "
    "memory access or goes on with a wrong token.",
    remove_when="PPHandler takes vllm.utils.torch_utils.current_stream, or Worker.init_device calls it.",
    install=f"{__name__}:install",
    is_live=f"{__name__}:is_live",
    places=WORKER,
    upstream=(
        Upstream(
            "vllm.utils.torch_utils:current_stream",
            "c748b28ee1842676cb3df2a00ea403c76c52195eb0f4ea5b27cf9796323da45f",
        ),
        Upstream(
            "vllm.v1.worker.gpu.pp_utils:PPHandler.__init__",
            "6bfca703c48e13744f7057b8484fb004c60b4e3bcf69653c5e068a3f902c6bad",
        ),
        Upstream(
            "vllm.v1.worker.gpu.pp_utils:PPHandler.get_prev_sampled_outputs",
            "a66cc7a904a9768e962e1886638b4dc96dc5cbbe2ca19f1e18e6ddcd05cd6c81",
        ),
        Upstream(
            "vllm.v1.worker.gpu.pp_utils:PPHandler.receive",
            "fa9f9e842ee87be3d8e8504c083d4e2f48d300685d3d539fa9283360526f2513",
        ),
        Upstream(
            "vllm.v1.worker.gpu.pp_utils:PPHandler.broadcast",
            "2e5ff48485849cff0e308cc11d042b3a64b406e3714c16928e7e059bfc2d1ef0",
        ),
        Upstream(
            "vllm.distributed.device_communicators.pynccl:PyNcclCommunicator.__init__",
            "781648c586af97960bcc3ca90fbc80639801b2e2e97e350d2230ae1fbdc1bca0",
        ),
        Upstream(
            "vllm.distributed.device_communicators.pynccl:PyNcclCommunicator._init_comm",
            "29d1864f37bdec75c4be4eea82380381a3b228ac8aa91814989ed6ed009e225f",
        ),
        Upstream(
            "vllm.v1.worker.gpu_worker:Worker._make_model_runner",
            "2bda2a14b4c248122a47a205d32a9cda5b5c09aa1b977ce05dca01b200458ce6",
        ),
    ),
)
