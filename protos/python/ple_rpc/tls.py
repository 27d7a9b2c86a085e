"""Credentials of a client whose table lives on another host."""

from pathlib import Path

import grpc


def client_credentials(certificate: Path, key: Path, server_ca: Path) -> grpc.ChannelCredentials:
    """For `TableClient("HOST:PORT", credentials=...)`, from PEM files.

    The daemon lets in who shows a certificate of its client authority; `server_ca` is the authority that
    signed the daemon's, whose name must be the HOST of the address. Raises OSError.
    """
    return grpc.ssl_channel_credentials(server_ca.read_bytes(), key.read_bytes(), certificate.read_bytes())
