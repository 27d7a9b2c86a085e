"""vLLM's own HTTP application, its middlewares and ours, over an engine that is a stand-in; no GPU.

Not a test: run by test_middleware.py where vllm can be imported. Takes a JSON argument, prints its port.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from argparse import Namespace
from types import SimpleNamespace

import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from vllm.entrypoints.serve.instrumentator.health import router
from vllm.entrypoints.serve.middleware.register import init_entrypoints_middleware

from ple_inference.vllm_engine.vllm_arguments import MIDDLEWARE


async def no_fault() -> None:
    pass


def main() -> None:
    given = json.loads(sys.argv[1])
    app = FastAPI()
    app.include_router(router)

    @app.get("/v1/stream")
    async def stream() -> StreamingResponse:
        async def events():
            for number in range(3):
                yield f"data: {number}\n\n"
                await asyncio.sleep(0)

        return StreamingResponse(events(), media_type="text/event-stream")

    args = Namespace(
        allowed_origins=["*"], allow_credentials=False, allowed_methods=["*"], allowed_headers=["*"],
        api_key=["secret"], enable_request_id_headers=True, middleware=[MIDDLEWARE],
        served_model_name=["flash-next"], model="/models/x",
    )  # fmt: skip
    init_entrypoints_middleware(args, app, ("generate",))
    app.state.args = args
    app.state.engine_client = SimpleNamespace(
        errored=False,
        check_health=no_fault,
        output_processor=SimpleNamespace(get_num_unfinished_requests=lambda: 0),
    )
    app.state.vllm_config = SimpleNamespace(
        additional_config={"triplex": {"table": "unix:/x", "wait_file": given["wait_file"]}},
        cache_config=SimpleNamespace(
            cache_dtype="auto", enable_prefix_caching=True, block_size=1568, num_gpu_blocks=300
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=512),
        model_config=SimpleNamespace(
            hf_text_config=SimpleNamespace(to_dict=lambda: given["text"]),
            uses_mrope=True,
            max_model_len=262_144,
        ),
    )
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])


if __name__ == "__main__":
    main()
