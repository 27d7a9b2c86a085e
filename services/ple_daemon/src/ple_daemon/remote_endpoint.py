"""Where the daemon listens for other hosts, and who may come in: mutual TLS, or loopback only."""

import ipaddress
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import grpc

from ple_daemon.errors import EndpointError

_SCHEME = "tcp://"
_MAX_PORT = 65_535


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files: what the daemon shows, and the authority whose clients it lets in."""

    certificate: Path
    key: Path
    client_ca: Path


@dataclass(frozen=True, slots=True)
class RemoteEndpoint:
    """`address` is host:port; no credentials means plaintext, on loopback only."""

    address: str
    credentials: grpc.ServerCredentials | None


def remote_endpoint(
    listen: str | None, certificate: Path | None, key: Path | None, client_ca: Path | None
) -> RemoteEndpoint | None:
    """Check what was asked for, None for nothing. Raises EndpointError, which says what to do."""
    options = {"--tls-cert": certificate, "--tls-key": key, "--tls-client-ca": client_ca}
    if listen is None:
        for option, path in options.items():
            if path is not None:
                raise EndpointError(f"{option} {path}: is of no use without --listen tcp://HOST:PORT")
        return None
    address = listen.removeprefix(_SCHEME)
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if int(port) > _MAX_PORT:  # gRPC would take the rest of the division
        raise EndpointError(f"--listen {listen}: there is no port {port}; ports end at {_MAX_PORT}")
    missing = [option for option, path in options.items() if path is None]
    if certificate is None or key is None or client_ca is None:
        if len(missing) < len(options):
            raise EndpointError(f"--listen {listen}: mutual TLS also needs {' and '.join(missing)}")
        if not _is_loopback(host):
            raise EndpointError(
                f"--listen {listen}: {host or 'any address'} can be reached from other hosts; "
                f"give {', '.join(missing)}, or listen on 127.0.0.1"
            )
        return RemoteEndpoint(address, None)
    return RemoteEndpoint(address, _credentials(TlsFiles(certificate, key, client_ca)))


def _credentials(files: TlsFiles) -> grpc.ServerCredentials:
    _check(files)
    pair = files.key.read_bytes(), files.certificate.read_bytes()
    authority = files.client_ca.read_bytes()
    make = cast("Callable[..., grpc.ServerCredentials]", grpc.ssl_server_credentials)
    return make([pair], authority, require_client_auth=True)


def _check(files: TlsFiles) -> None:
    """gRPC accepts broken files and then refuses every client; ask OpenSSL first."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    checks: list[tuple[str, Callable[..., None], tuple[Path, ...]]] = [
        ("--tls-cert with --tls-key", context.load_cert_chain, (files.certificate, files.key)),
        ("--tls-client-ca", context.load_verify_locations, (files.client_ca,)),
    ]
    for option, load, paths in checks:
        try:
            load(*paths)
        except ssl.SSLError as error:
            raise EndpointError(f"{option} {paths[0]}: not usable: {error.reason or error}") from error
        except OSError as error:
            raise EndpointError(f"{option} {paths[0]}: cannot be read: {error.strerror}") from error


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
