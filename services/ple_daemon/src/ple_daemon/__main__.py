"""The `ple-daemon` command: serve, build, verify."""

import argparse
import logging
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

from ple_daemon import kernel_cache, settings
from ple_daemon.errors import DaemonError

_EXAMPLES = """examples:
  ple-daemon serve /models/flash-next                       read the shards of a checkpoint in place
  ple-daemon serve table.ple --http-address 127.0.0.1:8200  read a flat file
  ple-daemon build /models/flash-next table.ple             make the flat file
  ple-daemon verify table.ple                               read everything and compare checksums
  ple-daemon verify /models/flash-next --write              record checksums of a checkpoint

Every option of serve can also be set in the environment, as PLE_DAEMON_RUN_DIR and so on.
"""


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    options = vars(_parser().parse_args(arguments))
    command = options.pop("command")
    try:
        return int(command(**options))
    except DaemonError as error:
        print(f"ple-daemon: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"ple-daemon: the system refused: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("ple-daemon: interrupted", file=sys.stderr)
        return 130


def _serve(**options: object) -> int:
    chosen = settings.load({name: value for name, value in options.items() if value is not None})
    _log_to_stderr(chosen.log_level)
    kernel_cache.prepare(chosen.cache_dir)
    from ple_daemon.daemon import serve

    serve(chosen)
    return 0


def _build(checkpoint: Path, out: Path, force: bool) -> int:
    kernel_cache.prepare(settings.cache_dir())
    from ple_daemon.build import build

    # Unwind as on Ctrl-C, so that a half-written file does not stay.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    made = build(checkpoint, out, force=force)
    print(f"{out}: {'written' if made else 'already is this table, nothing written (--force writes anyway)'}")
    return 0


def _verify(table: Path, write: bool) -> int:
    from ple_daemon.verify import verify, write_manifest

    if write:
        print(f"{write_manifest(table)}: written")
    else:
        print(f"{table}: intact, {verify(table)} checksums match")
    return 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"ple-daemon: {message}; try {self.prog} --help", file=sys.stderr)
        raise SystemExit(2)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="ple-daemon", description="Owns the n-gram (PLE) table of a Qwen4Exp model.", epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    serve = commands.add_parser("serve", help="answer lookups until SIGTERM", epilog=_EXAMPLES,
                                formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    serve.set_defaults(command=_serve)
    serve.add_argument("table", nargs="?", type=Path, help="checkpoint folder or flat file")
    serve.add_argument("--run-dir", type=Path, help="folder of table.sock (default: private to this folder)")
    serve.add_argument("--http-address", metavar="HOST:PORT", help="health and metrics (127.0.0.1:8200)")
    serve.add_argument("--advice", choices=["auto", "process_madvise", "posix_fadvise", "none"])
    serve.add_argument("--cache-dir", type=Path, help="where compiled kernels are kept")
    serve.add_argument("--drain-timeout-s", type=float, help="for running calls after SIGTERM (10)")
    serve.add_argument("--watch-interval-s", type=float, help="between looks at the table's files (10)")
    serve.add_argument("--max-concurrent-calls", type=int, help="calls at once, open streams included (64)")
    serve.add_argument(
        "--client-gid", type=int, help="group that may share memory (root and the own user may)"
    )
    serve.add_argument("--max-queued-prefetches", type=int, help="prompts that may wait (64)")
    serve.add_argument("--log-level", choices=["debug", "info", "warning", "error"])
    build = commands.add_parser("build", help="make a flat file of a checkpoint's table")
    build.set_defaults(command=_build)
    build.add_argument("checkpoint", type=Path)
    build.add_argument("out", type=Path, metavar="OUT.ple")
    build.add_argument("--force", action="store_true", help="write even when OUT.ple already is this table")
    verify = commands.add_parser("verify", help="read the whole table and compare checksums")
    verify.set_defaults(command=_verify)
    verify.add_argument("table", type=Path, help="flat file, or checkpoint folder with ple-checksums.json")
    verify.add_argument("--write", action="store_true", help="record a checkpoint's checksums instead")
    return parser


def _log_to_stderr(level: str) -> None:
    formatter = logging.Formatter(
        "%(asctime)s.%(msecs)03dZ %(levelname)s ple-daemon %(message)s", "%Y-%m-%dT%H:%M:%S"
    )
    formatter.converter = time.gmtime
    handler = logging.StreamHandler()
    handler.setFormatter(formatter)
    logging.basicConfig(level=level.upper(), handlers=[handler])


if __name__ == "__main__":
    sys.exit(main())
