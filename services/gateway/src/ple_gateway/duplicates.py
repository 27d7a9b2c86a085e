"""Retries of a request that is still being served: they would read the same long prompt a second time."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import Scope

from ple_gateway.errors import GatewayError
from ple_gateway.exchange import exchange_of

_LEAVE_S = 2.0  # a client that gave up and retries is noticed to have left within one


@dataclass(eq=False)
class _Original:
    idempotency_key: str | None
    ended: asyncio.Event


class Duplicates:
    """Knows what is in flight by key, path and body.

    The same body twice is no mistake: samples are drawn so. It is one when the client marks it as a retry
    (the SDKs' count of retries, or the same Idempotency-Key) while its first attempt runs on, because a proxy
    in between keeps that connection open.
    """

    def __init__(self) -> None:
        self._in_flight: dict[tuple[str | None, str, bytes], set[_Original]] = {}

    @asynccontextmanager
    async def serving(self, scope: Scope, digest: bytes) -> AsyncIterator[None]:
        """Count a request as in flight within the block; raises 409 for a retry of one that stays so."""
        headers = Headers(scope=scope)
        name = (exchange_of(scope).key, scope["path"], digest)
        idempotency_key = headers.get("idempotency-key")
        await self._outlast(name, idempotency_key, retried=_is_retry(headers))
        own = _Original(idempotency_key, asyncio.Event())
        self._in_flight.setdefault(name, set()).add(own)
        try:
            yield
        finally:
            own.ended.set()
            self._in_flight[name].remove(own)
            if not self._in_flight[name]:
                del self._in_flight[name]

    async def _outlast(
        self, name: tuple[str | None, str, bytes], idempotency_key: str | None, *, retried: bool
    ) -> None:
        originals = [
            original
            for original in self._in_flight.get(name, ())
            if retried or (idempotency_key and original.idempotency_key == idempotency_key)
        ]
        try:
            async with asyncio.timeout(_LEAVE_S):
                for original in originals:
                    await original.ended.wait()
        except TimeoutError as exc:
            raise GatewayError(
                409,
                "This request is a retry of one that is still being served.",
                code="duplicate_request",
                may_retry=False,
            ) from exc


def _is_retry(headers: Headers) -> bool:
    count = headers.get("x-stainless-retry-count", "")
    return count.isascii() and count.isdigit() and bool(count.strip("0"))
