"""`python -m ple_gateway.images.worker`: takes pictures on stdin, answers on stdout.

Requests have no media type, nor have errors, whose data is a text for the client.
"""

import argparse
import resource
import signal
import sys
from typing import BinaryIO

from ple_gateway.images.data_url import BadImageError
from ple_gateway.images.frames import pack_frame, unpack_header
from ple_gateway.images.normalise import NormaliseLimits, normalise


def main() -> None:
    """Serve until stdin ends."""
    parser = argparse.ArgumentParser()
    for name in ("memory-bytes", "timeout-s", "max-source-px", "max-side-px", "max-px"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = parser.parse_args()
    # Before Pillow sees a byte of anyone's.
    resource.setrlimit(resource.RLIMIT_AS, (options.memory_bytes, options.memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the gateway, which closes stdin
    import pillow_heif
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None  # ours is checked, and answered with a reason
    Image.init()  # all readers now, not inside the first picture's time limit
    pillow_heif.register_heif_opener()
    limits = NormaliseLimits(options.max_source_px, options.max_side_px, options.max_px)
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    _answer(answers, "ready", b"")
    while (data := _read_request(requests)) is not None:
        # The default action ends the process even inside a decoder that never returns: nobody else may be
        # left to do it.
        signal.alarm(options.timeout_s)
        try:
            media_type, picture = normalise(data, limits)
            _answer(answers, media_type, picture)
        except BadImageError as error:
            _answer(answers, "", str(error).encode())
        signal.alarm(0)


def _read_request(requests: BinaryIO) -> bytes | None:
    header = requests.read(8)
    if len(header) < 8:
        return None
    _, data_bytes = unpack_header(header)
    data = requests.read(data_bytes)
    return data if len(data) == data_bytes else None


def _answer(answers: BinaryIO, media_type: str, data: bytes) -> None:
    answers.write(pack_frame(media_type, data))
    answers.flush()


if __name__ == "__main__":
    main()
