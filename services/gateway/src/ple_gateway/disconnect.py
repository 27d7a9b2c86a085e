"""Notice that a client left while its request is being served."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from ple_gateway.body import ClientLeftError

_T = TypeVar("_T")


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """Run `work`; when the client leaves first, cancel it, wait for its end and raise ClientLeftError.

    Servers cancel a streaming response at once but let a plain handler run to its end: racing `receive()`
    treats both alike.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeftError
        return task.result()
    finally:
        watcher.cancel()
        task.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
