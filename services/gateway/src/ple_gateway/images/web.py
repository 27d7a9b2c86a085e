"""Pictures from the web, for gateways that allow it: https only, from public addresses only.

A name is resolved once, every address that it has must be public, and the connection goes to one of those
that were checked: a name that answers differently the second time is never asked a second time.
"""

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Awaitable, Callable

import httpx2

from ple_gateway.images.data_url import BadImageError

Resolve = Callable[[str, int], Awaitable[list[str]]]

_NAT64 = ipaddress.ip_network("64:ff9b::/96")  # the last 32 bits are an IPv4 address
_MAX_URL_CHARS = 8192
_HEADERS = {"accept": "image/*", "accept-encoding": "identity", "user-agent": "ple-gateway"}


class WebImages:
    """Fetches pictures. No text of its errors names an address."""

    def __init__(
        self,
        max_bytes: int,
        timeout_s: float,
        *,
        resolve: Resolve | None = None,
        is_public: Callable[[str], bool] | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._resolve = resolve or _resolve
        self._is_public = is_public or is_public_address
        self._tls = tls
        self._client: httpx2.AsyncClient | None = None

    async def aclose(self) -> None:
        """Close all connections."""
        if self._client:
            await self._client.aclose()

    async def fetch(self, url: str) -> bytes:
        """Return the file at an https URL; raises BadImageError."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._fetch(url)
        except TimeoutError as exc:
            raise BadImageError("it cannot be fetched in time") from exc
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError, ValueError) as exc:
            raise BadImageError("it cannot be fetched") from exc

    async def _fetch(self, text: str) -> bytes:
        url = _checked_url(text)
        host = url.raw_host.decode("ascii")
        addresses = await self._resolve(host, url.port or 443)
        if not addresses or not all(self._is_public(address) for address in addresses):
            raise BadImageError("its host is not a public one")
        request = httpx2.Request(
            "GET",
            url.copy_with(host=addresses[0]),
            headers={**_HEADERS, "host": url.netloc.decode("ascii")},
            extensions={"sni_hostname": host},  # also the name that its certificate must have
        )
        response = await self._started_client().send(request, stream=True)
        try:
            return await self._read(response)
        finally:
            await response.aclose()

    def _started_client(self) -> httpx2.AsyncClient:
        if self._client is None:
            # Connections are not kept: they are told apart by address, and one address serves many names.
            self._client = httpx2.AsyncClient(
                verify=self._tls or True,
                limits=httpx2.Limits(max_connections=None, max_keepalive_connections=0),
                timeout=self._timeout_s,
                trust_env=False,
                follow_redirects=False,
            )
        return self._client

    async def _read(self, response: httpx2.Response) -> bytes:
        if response.is_redirect:
            raise BadImageError("its server redirects, which is not followed")
        if response.status_code != 200:
            raise BadImageError(f"its server answers with status {response.status_code}")
        if response.headers.get("content-encoding", "identity") != "identity":
            raise BadImageError("its server compresses it")
        received = bytearray()
        async for chunk in response.aiter_raw():
            received += chunk
            if len(received) > self._max_bytes:
                raise BadImageError(f"it is larger than {self._max_bytes} bytes")
        return bytes(received)


def is_public_address(text: str) -> bool:
    """Whether an address is one of the public internet, also where it wraps another."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address):
        if address in _NAT64:
            return is_public_address(str(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)))
        wrapped = address.ipv4_mapped or address.sixtofour
        if address.teredo or address.is_site_local:
            return False
        if wrapped and not is_public_address(str(wrapped)):
            return False
    return address.is_global and not address.is_multicast and not address.is_reserved


def _checked_url(text: str) -> httpx2.URL:
    if len(text) > _MAX_URL_CHARS:
        raise BadImageError("its URL is too long")
    url = httpx2.URL(text.strip())
    if url.scheme != "https" or not url.raw_host:
        raise BadImageError("only https URLs are fetched")
    if url.userinfo:
        raise BadImageError("its URL holds credentials")
    return url


async def _resolve(host: str, port: int) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]
