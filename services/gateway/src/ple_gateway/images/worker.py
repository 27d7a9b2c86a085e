"""`python -m ple_gateway.images.worker`: takes pictures on stdin, answers on stdout.

An answer's kind is the picture's media type, or `error` with a text for the client.
"""

import argparse

from ple_gateway.images.data_url import BadImageError
from ple_gateway.images.normalise import NormaliseLimits, normalise
from ple_gateway.workers import confine, serve_jobs


def main() -> None:
    """Serve until stdin ends."""
    parser = argparse.ArgumentParser()
    for name in ("memory-bytes", "timeout-s", "max-source-px", "max-side-px", "max-px"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = parser.parse_args()
    confine(options.memory_bytes)
    import pillow_heif
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None  # ours is checked, and answered with a reason
    Image.init()  # all readers now, not inside the first picture's time limit
    pillow_heif.register_heif_opener()
    limits = NormaliseLimits(options.max_source_px, options.max_side_px, options.max_px)

    def work(_kind: str, data: bytes) -> tuple[str, bytes]:
        try:
            return normalise(data, limits)
        except BadImageError as error:
            return "error", str(error).encode()

    serve_jobs(work, options.timeout_s)


if __name__ == "__main__":
    main()
