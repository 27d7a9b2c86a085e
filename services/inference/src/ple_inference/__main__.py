"""Composes the commands of ple-inference."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ple_inference.log_lines import log_to_stderr
from ple_inference.settings import PREFIX, Settings, SettingsError, load_settings

if TYPE_CHECKING:
    from ple_inference.tiny.config import TinyOptions

_EXAMPLES = """examples:
  ple-inference tiny var/models/triplex-tiny
  ple-inference serve --engine reference --model var/models/triplex-tiny --table unix:/run/triplex/table.sock
"""


class CommandError(Exception):
    """Ends the process with its one line and a non-zero status."""


def main() -> None:
    parser = _parser()
    args = parser.parse_args()
    try:
        code = args.run(args)
    except CommandError as error:
        print(f"ple-inference: {error}", file=sys.stderr)
        code = 1
    sys.exit(code)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ple-inference",
        description="Serves a Qwen4Exp model whose n-gram table lies in the PLE daemon.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_tiny(commands)
    _add_serve(commands)
    return parser


def _add_tiny(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    tiny = commands.add_parser(
        "tiny",
        help="make a random checkpoint to try everything with",
        description="Makes a random Qwen4Exp checkpoint in the released layout, with its n-gram table.",
        epilog="examples:\n  ple-inference tiny var/models/triplex-tiny\n"
        "  ple-inference tiny /tmp/t --vocab tiny --dtype f32 --table-rows-base 2000\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    tiny.add_argument("out", type=Path, metavar="OUT", help="folder to make")
    tiny.add_argument(
        "--vocab", choices=("real", "tiny"), default="real", help="248,320 or 512 ids (default real)"
    )
    tiny.add_argument("--dtype", choices=("bf16", "f32"), default="bf16", help="of weights and table rows")
    tiny.add_argument("--seed", type=int, default=0, help="other seed, other weights (default 0)")
    tiny.add_argument("--layers", type=int, default=4, help="decoder layers, a multiple of 4 (default 4)")
    tiny.add_argument(
        "--table-rows-base",
        type=int,
        default=13_200,
        help="ngram_vocab_size_base; the table gets about 16 times as many rows (default 13200)",
    )
    tiny.add_argument("--force", action="store_true", help="replace what OUT holds")
    tiny.set_defaults(run=_run_tiny)


def _add_serve(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    serve = commands.add_parser(
        "serve",
        help="serve a checkpoint over an OpenAI-compatible API",
        description="Serves a checkpoint; its n-gram rows come from ple-daemon, which may start later.",
        epilog="examples:\n  ple-inference serve --model var/models/triplex-tiny\n"
        "  ple-inference serve --model /models/tiny --table unix:/run/triplex/table.sock "
        "--http-address 127.0.0.1:8100\n\n"
        "Every field of Settings can be set as PLE_INFERENCE_<FIELD>; flags come first. Fields:\n  "
        + "\n  ".join(Settings.model_fields),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    serve.add_argument("--engine", metavar="reference", help="reference: Transformers on a CPU (default)")
    serve.add_argument("--model", type=Path, metavar="DIR", help="folder of the checkpoint")
    serve.add_argument("--table", dest="table_address", metavar="ADDRESS", help="the daemon, unix:PATH")
    serve.add_argument("--http-address", metavar="HOST:PORT", help="default 127.0.0.1:8100")
    serve.add_argument("--served-model-name", metavar="NAME", help="default: the folder's name")
    serve.add_argument("--max-num-seqs", type=int, metavar="N", help="sequences that decode at once")
    serve.add_argument("--log-level", choices=("debug", "info", "warning", "error"))
    serve.set_defaults(run=_run_serve)


def _run_serve(args: argparse.Namespace) -> int:
    flags = {name: value for name, value in vars(args).items() if name != "run"}
    environ = os.environ
    if (args.engine or environ.get(f"{PREFIX}ENGINE")) == "vllm":
        raise CommandError("engine vllm is not built yet; use --engine reference")
    try:
        settings = load_settings(environ, flags, Path.cwd())
    except SettingsError as error:
        raise CommandError(str(error)) from error
    _require_reference_extra()
    log_to_stderr(settings.log_level)
    fields = " ".join(f"{name}={value}" for name, value in settings.model_dump().items())
    logging.getLogger(__name__).info("settings %s", fields)
    _serve(settings)
    return 0


def _serve(settings: Settings) -> None:
    from ple_inference.reference.checkpoint import CheckpointError, read_checkpoint

    try:
        checkpoint = read_checkpoint(settings.model)
    except CheckpointError as error:
        raise CommandError(str(error)) from error
    from ple_inference.reference.serve import ServeError, serve

    try:
        serve(settings, checkpoint)
    except ServeError as error:
        raise CommandError(str(error)) from error


def _run_tiny(args: argparse.Namespace) -> int:
    from ple_inference.tiny.config import TinyOptions
    from ple_inference.tiny.stamp import OutputExistsError, check_replaceable, is_complete

    out = args.out.absolute()
    try:
        options = TinyOptions(args.vocab, args.dtype, args.seed, args.layers, args.table_rows_base)
    except ValueError as error:
        raise CommandError(str(error)) from error
    if is_complete(out, options) and not args.force:
        print(f"{out} is already complete with these options")
        return 0
    try:
        if not args.force:
            check_replaceable(out)
    except OutputExistsError as error:
        raise CommandError(str(error)) from error
    _require_reference_extra()
    _write_tiny(out, options, force=args.force)
    print(f"wrote {out}")
    return 0


def _write_tiny(out: Path, options: TinyOptions, *, force: bool) -> None:
    from tqdm import tqdm

    from ple_inference.tiny.tokenizer import VocabularyError
    from ple_inference.tiny.writer import STEPS, write_checkpoint

    with tqdm(total=STEPS, desc="tiny checkpoint", unit="part", disable=None) as bar:

        def advance(part: str) -> None:
            bar.set_postfix_str(part)
            bar.update()

        try:
            write_checkpoint(out, options, force=force, progress=advance)
        except VocabularyError as error:
            raise CommandError(str(error)) from error
        except OSError as error:
            raise CommandError(f"cannot write {out}: {error.strerror or error}") from error


def _require_reference_extra() -> None:
    missing = [name for name in ("torch", "transformers", "safetensors") if find_spec(name) is None]
    if missing:
        raise CommandError(f"{', '.join(missing)} not installed; install ple-inference[reference]")


if __name__ == "__main__":
    main()
