"""A client below HTTP: what tests do with a socket."""

import socket
import struct


def read_to(sock: socket.socket, end: bytes) -> bytes:
    """All bytes up to and with `end`, and what came with it."""
    received = b""
    while end not in received:
        data = sock.recv(65536)
        assert data, received
        received += data
    return received


def reset(sock: socket.socket) -> None:
    """Close by RST, as a killed client's machine does."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()
