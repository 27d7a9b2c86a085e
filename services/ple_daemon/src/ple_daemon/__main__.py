"""The `ple-daemon` command: serve, build, verify, probe, bench, simulate."""

import argparse
import logging
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn, TypeAlias

from ple_daemon import kernel_cache, settings
from ple_daemon.errors import DaemonError

_Commands: TypeAlias = "argparse._SubParsersAction[_Parser]"

_EXAMPLES = """examples:
  ple-daemon serve /models/flash-next                       read the shards of a checkpoint in place
  ple-daemon serve table.ple --http-address 127.0.0.1:8200  read a flat file
  ple-daemon build /models/flash-next table.ple             make the flat file
  ple-daemon verify table.ple                               read everything and compare checksums
  ple-daemon verify /models/flash-next --write              record checksums of a checkpoint
  ple-daemon probe /mnt/nvme --plot probe.png               does this drive suit the table?
  ple-daemon bench table.ple                                what the daemon gains on this drive
  ple-daemon simulate trace.jsonl --cache-gib 1 2 4         would a cache of rows in RAM help?
  ple-daemon serve table.ple --listen tcp://0.0.0.0:8300 --tls-cert daemon.pem --tls-key daemon.key \\
      --tls-client-ca clients.pem                           serve other hosts too

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


def _probe(path: Path, seconds: float, size_gib: float, plot: Path | None, as_json: bool) -> int:
    kernel_cache.prepare(settings.cache_dir())
    from ple_daemon.plot import check_plotting, plot_probe
    from ple_daemon.probe import probe

    if plot is not None:
        check_plotting(plot)
    # Unwind as on Ctrl-C, so that the scratch file does not stay.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    found = probe(path, seconds, int(size_gib * 1024**3))
    print(found.as_json() if as_json else found.as_text())
    if plot is not None:
        plot_probe(found, plot)
    return 0


def _bench(table: Path, rounds: int) -> int:
    kernel_cache.prepare(settings.cache_dir())
    from ple_daemon.bench import Effort, measure
    from ple_daemon.contest import HEADING, Figure

    figures: list[Figure] = []
    for figure in measure(table, Effort(rounds=rounds)):
        if not figures:
            print(HEADING)
        figures.append(figure)
        print(figure, flush=True)
    return 0 if all(figure.is_met for figure in figures) else 1


def _simulate(  # noqa: PLR0913, PLR0917 - one for each option
    trace: Path | None,
    checkpoint: Path | None,
    cache_gib: list[float],
    page_cache_gib: float,
    learn: float,
    synthetic: str | None,
    tokens: int,
    plot: Path | None,
    as_json: bool,
) -> int:
    kernel_cache.prepare(settings.cache_dir())
    from ple_daemon.plot import check_plotting, plot_simulation
    from ple_daemon.simulate import checkpoint_shape, released_shape, simulate
    from ple_daemon.trace import TraceError, read_trace, zipf_trace

    if plot is not None:
        check_plotting(plot)
    if (trace is None) == (synthetic is None):
        raise TraceError("simulate: give either a TRACE or --synthetic zipf")
    shape = released_shape() if checkpoint is None else checkpoint_shape(checkpoint)
    sequences = zipf_trace(tokens, shape.vocab_size) if trace is None else read_trace(trace)
    found = simulate(sequences, shape, cache_gib, page_cache_gib, learn)
    print(found.as_json() if as_json else found.as_text())
    if plot is not None:
        plot_simulation(found, plot)
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
    _add_serve(commands)
    _add_build_and_verify(commands)
    _add_probe(commands)
    _add_bench(commands)
    _add_simulate(commands)
    return parser


def _add_serve(commands: _Commands) -> None:
    serve = commands.add_parser("serve", help="answer lookups until SIGTERM", epilog=_EXAMPLES,
                                formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    serve.set_defaults(command=_serve)
    serve.add_argument("table", nargs="?", type=Path, help="checkpoint folder or flat file")
    serve.add_argument("--run-dir", type=Path, help="folder of table.sock (default: private to this folder)")
    serve.add_argument("--http-address", metavar="HOST:PORT", help="health and metrics (127.0.0.1:8200)")
    serve.add_argument("--listen", metavar="tcp://HOST:PORT", help="serve other hosts too, with mutual TLS")
    serve.add_argument("--tls-cert", type=Path, metavar="PEM", help="the daemon's certificate")
    serve.add_argument("--tls-key", type=Path, metavar="PEM", help="its key")
    serve.add_argument(
        "--tls-client-ca", type=Path, metavar="PEM", help="who signs the clients' certificates"
    )
    serve.add_argument("--advice", choices=["auto", "process_madvise", "posix_fadvise", "none"])
    serve.add_argument("--cache-dir", type=Path, help="where compiled kernels are kept")
    serve.add_argument("--drain-timeout-s", type=float, help="for running calls after SIGTERM (10)")
    serve.add_argument("--watch-interval-s", type=float, help="between looks at the table's files (10)")
    serve.add_argument("--max-concurrent-calls", type=int, help="calls at once, open streams included (64)")
    serve.add_argument(
        "--client-gid", type=int, help="group that may share memory (root and the own user may)"
    )
    serve.add_argument(
        "--client-silence-s", type=float, help="after which a client whose host is dumb has left (50)"
    )
    serve.add_argument("--max-queued-prefetches", type=int, help="prompts that may wait (64)")
    serve.add_argument("--max-prefetches-per-session", type=int, help="of these, for one session (32)")
    serve.add_argument(
        "--drive-probe-interval-s", type=float, help="between probe reads of the drive (1; 0: none)"
    )
    serve.add_argument("--resident-interval-s", type=float, help="between looks at the page cache (30)")
    serve.add_argument("--log-level", choices=["debug", "info", "warning", "error"])


def _add_build_and_verify(commands: _Commands) -> None:
    build = commands.add_parser("build", help="make a flat file of a checkpoint's table")
    build.set_defaults(command=_build)
    build.add_argument("checkpoint", type=Path)
    build.add_argument("out", type=Path, metavar="OUT.ple")
    build.add_argument("--force", action="store_true", help="write even when OUT.ple already is this table")
    verify = commands.add_parser("verify", help="read the whole table and compare checksums")
    verify.set_defaults(command=_verify)
    verify.add_argument("table", type=Path, help="flat file, or checkpoint folder with ple-checksums.json")
    verify.add_argument("--write", action="store_true", help="record a checkpoint's checksums instead")


def _add_probe(commands: _Commands) -> None:
    probe = commands.add_parser("probe", help="test whether a drive suits the table")
    probe.set_defaults(command=_probe)
    probe.add_argument(
        "path", type=Path, help="a large file on the drive (best: the table), or a folder to write into"
    )
    probe.add_argument("--seconds", type=_positive, default=60.0, help="how long latency is watched (60)")
    probe.add_argument(
        "--size-gib", type=_positive, default=8.0, help="of the scratch file made in a folder (8)"
    )
    probe.add_argument("--plot", type=Path, metavar="OUT.png", help="also draw it (needs ple-daemon[plot])")
    probe.add_argument("--json", action="store_true", dest="as_json", help="print JSON")


def _add_bench(commands: _Commands) -> None:
    bench = commands.add_parser("bench", help="measure what the daemon gains on a table and its drive")
    bench.set_defaults(command=_bench)
    bench.add_argument("table", type=Path, help="checkpoint folder or flat file, not in use by others")
    bench.add_argument("--rounds", type=_rounds, default=5, help="turns of each side, 5 or more (5)")


def _add_simulate(commands: _Commands) -> None:
    simulate = commands.add_parser("simulate", help="replay a token trace against caches of rows in RAM")
    simulate.set_defaults(command=_simulate)
    simulate.add_argument("trace", nargs="?", type=Path, help="ids as text or .npy, or requests as .jsonl")
    simulate.add_argument(
        "--checkpoint", type=Path, help="folder with config.json (default: the released constants)"
    )
    simulate.add_argument(
        "--cache-gib", type=_positive, nargs="+", default=[2.4], help="extra memory, one or more (2.4)"
    )
    simulate.add_argument(
        "--page-cache-gib", type=_positive, default=2.5, help="memory that the table has anyway (2.5)"
    )
    simulate.add_argument(
        "--learn", type=_share, default=0.5, help="share of the trace that warms and teaches (0.5)"
    )
    simulate.add_argument("--synthetic", choices=["zipf"], help="make a trace instead of reading one")
    simulate.add_argument("--tokens", type=int, default=1_000_000, help="of a synthetic trace (1,000,000)")
    simulate.add_argument(
        "--plot", type=Path, metavar="OUT.png", help="also draw it (needs ple-daemon[plot])"
    )
    simulate.add_argument("--json", action="store_true", dest="as_json", help="print JSON")


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a share from 0 to 1")
    return value


def _rounds(text: str) -> int:
    value = int(text)
    if value < 5:
        raise argparse.ArgumentTypeError("a median needs 5 rounds or more")
    return value


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
