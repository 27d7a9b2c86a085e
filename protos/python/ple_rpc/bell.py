"""The words on the doorbell, a SOCK_SEQPACKET Unix socket beside the daemon's gRPC socket.

A connection begins with a greeting that carries the session's token and, as ancillary data, the descriptor of
the client's region; the answer is a status and, when it is not OK, a reason in UTF-8. After that each side
rings with 16 bytes: the client to ask for the rows of a slot's ids, the daemon when they are there.
"""

import struct

BELL_NAME = "bell.sock"
VERSION = 1

_MAGIC = b"PLE-BELL"
TOKEN_BYTES = 16
_GREETING = struct.Struct(f"<8sI{TOKEN_BYTES}s")
GREETING_BYTES = _GREETING.size
MAX_WELCOME_BYTES = 512

# Client to daemon: slot, rows, sequence. A slot's sequence grows with every ring.
RING = struct.Struct("<IIq")
# Daemon to client: slot, status (a gRPC code), sequence of the ring that it answers.
ANSWER = struct.Struct("<IIq")
RING_BYTES = RING.size


def greeting(token: bytes) -> bytes:
    return _GREETING.pack(_MAGIC, VERSION, token)


def parse_greeting(message: bytes) -> bytes:
    """The session token of a greeting. Raises ValueError."""
    if len(message) != GREETING_BYTES:
        raise ValueError(f"a greeting has {GREETING_BYTES} bytes, this one {len(message)}")
    magic, version, token = _GREETING.unpack(message)
    if magic != _MAGIC or version != VERSION:
        raise ValueError(f"not a greeting of version {VERSION}")
    return bytes(token)


def welcome(status: int, reason: str = "") -> bytes:
    return struct.pack("<I", status) + reason.encode()[: MAX_WELCOME_BYTES - 4]


def parse_welcome(message: bytes) -> tuple[int, str]:
    """Status and reason. Raises ValueError."""
    if len(message) < 4:
        raise ValueError("the answer to a greeting is too short")
    return struct.unpack_from("<I", message)[0], message[4:].decode(errors="replace")
