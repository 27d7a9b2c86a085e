"""Composes the commands of ple-inference."""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import signal
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ple_inference.garbage import uncollected
from ple_inference.log_lines import log_to_stderr
from ple_inference.settings import Settings, SettingsError, load_settings
from ple_rpc.rundir import run_directory

if TYPE_CHECKING:
    from ple_inference.synthetic.options import SyntheticOptions
    from ple_inference.tiny.config import TinyOptions
    from ple_inference.vllm_engine.launch import Launch

_EXAMPLES = """examples:
  ple-inference tiny var/models/triplex-tiny
  ple-inference serve --engine reference --model var/models/triplex-tiny --table unix:/run/triplex/table.sock
  ple-inference plan --model /models/CHECKPOINT --profile dual-80gb
  ple-inference serve --engine vllm --model /models/CHECKPOINT --profile dual-80gb
"""


class CommandError(Exception):
    """Ends the process with its one line and a non-zero status."""


def main() -> None:
    parser = _parser()
    own, for_vllm = _split(sys.argv[1:])
    args = parser.parse_args(own)
    args.for_vllm = for_vllm
    try:
        code = args.run(args)
    except CommandError as error:
        print(f"ple-inference: {error}", file=sys.stderr)
        code = 1
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    sys.exit(code)


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """What is before and after a --, which argparse treats differently from one Python to the next."""
    own = list(itertools.takewhile(lambda argument: argument != "--", arguments))
    return own, list(arguments[len(own) + 1 :])


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
    _add_plan(commands)
    return parser


def _add_tiny(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from ple_inference.synthetic.arguments import EXAMPLES, add_arguments

    tiny = commands.add_parser(
        "tiny",
        help="make a random checkpoint to try everything with",
        description="Makes a random Qwen4Exp checkpoint in the released layout, with its n-gram table. "
        "Small and in bf16 by default, for a laptop; with --shapes real or --quant for the vllm engine.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(tiny)
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
    serve.add_argument(
        "--engine",
        metavar="ENGINE",
        help="reference: Transformers on a CPU (default); vllm: on GPUs, its own arguments after a --",
    )
    _add_model(serve)
    serve.add_argument("--log-level", choices=("debug", "info", "warning", "error"))
    serve.set_defaults(run=_run_serve)


def _add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    plan = commands.add_parser(
        "plan",
        help="say what the vllm engine would run and take, without starting it",
        description="Says what `serve --engine vllm` would run, what each GPU would hold, and how many "
        "requests fit, by vLLM's own planner where vLLM is installed. Needs no GPU.",
        epilog=_profile_help(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_model(plan)
    plan.add_argument("--json", action="store_true", help="for programs")
    plan.set_defaults(run=_run_plan, engine="vllm")


def _add_model(command: argparse.ArgumentParser) -> None:
    command.add_argument("--model", type=Path, metavar="DIR", help="folder of the checkpoint")
    command.add_argument("--table", dest="table_address", metavar="ADDRESS", help="the daemon, unix:PATH")
    command.add_argument("--http-address", metavar="HOST:PORT", help="default 127.0.0.1:8100")
    command.add_argument("--served-model-name", metavar="NAME", help="default: the folder's name")
    command.add_argument("--max-num-seqs", type=int, metavar="N", help="sequences that decode at once")
    command.add_argument("--profile", metavar="NAME", help="vllm: what kind of machine it is")
    command.add_argument(
        "--pp", dest="pipeline_stages", type=int, metavar="N", help="vllm: as many GPUs, a stage on each"
    )
    command.add_argument(
        "--disable", action="append", default=[], metavar="OVERRIDE", help="vllm: switch an override off"
    )


def _profile_help() -> str:
    from ple_inference.vllm_engine.profile import PROFILES

    lines = [f"  {profile.name:14}{profile.summary}" for profile in PROFILES.values()]
    return "\n".join(["profiles:", *lines])


def _run_serve(args: argparse.Namespace) -> int:
    settings = _settings(args)
    if settings.engine == "vllm":
        return _run_vllm(args, settings)
    if args.for_vllm or args.disable:
        raise CommandError("arguments after a -- and --disable are for --engine vllm")
    _require_reference_extra()
    _log_settings(settings)
    _serve(settings)
    return 0


def _run_vllm(args: argparse.Namespace, settings: Settings) -> int:
    from ple_inference.checkpoint import CheckpointError
    from ple_inference.vllm_engine.launch import become_vllm
    from ple_inference.vllm_engine.preflight import check
    from ple_inference.vllm_engine.refused import Refused

    _log_settings(settings)
    try:
        with uncollected():
            launch = _compose(args, settings)
            check(launch, os.environ)
        become_vllm(launch, os.environ)
    except (Refused, CheckpointError) as error:
        raise CommandError(str(error)) from error
    return 0


def _run_plan(args: argparse.Namespace) -> int:
    from ple_inference.checkpoint import CheckpointError
    from ple_inference.vllm_engine.plan import as_json, as_text, make_plan
    from ple_inference.vllm_engine.refused import Refused

    settings = _settings(args)
    try:
        # None of a checkpoint's 200,000 tensors is garbage: a quarter of the time went into looking.
        with uncollected():
            plan = make_plan(_compose(args, settings))
    except (Refused, CheckpointError) as error:
        raise CommandError(str(error)) from error
    print(json.dumps(as_json(plan), indent=2) if args.json else as_text(plan))
    return 0


def _compose(args: argparse.Namespace, settings: Settings) -> Launch:
    from ple_inference.vllm_engine.launch import compose

    return compose(settings, run_directory(os.environ, Path.cwd()), args.disable, args.for_vllm)


def _settings(args: argparse.Namespace) -> Settings:
    flags = {name: value for name, value in vars(args).items() if name in Settings.model_fields}
    try:
        return load_settings(os.environ, flags, Path.cwd())
    except SettingsError as error:
        raise CommandError(str(error)) from error


def _log_settings(settings: Settings) -> None:
    log_to_stderr(settings.log_level)
    fields = " ".join(f"{name}={value}" for name, value in settings.model_dump().items())
    logging.getLogger(__name__).info("settings %s", fields)


def _serve(settings: Settings) -> None:
    from ple_inference.checkpoint import CheckpointError, read_checkpoint, refuse_quantized

    try:
        checkpoint = read_checkpoint(settings.model)
        refuse_quantized(checkpoint)
    except CheckpointError as error:
        raise CommandError(str(error)) from error
    from ple_inference.reference.serve import ServeError, serve

    try:
        serve(settings, checkpoint)
    except ServeError as error:
        raise CommandError(str(error)) from error


def _run_tiny(args: argparse.Namespace) -> int:
    from ple_inference.synthetic.arguments import options_of
    from ple_inference.tiny.config import TinyOptions
    from ple_inference.tiny.folder import sweep_unfinished
    from ple_inference.tiny.stamp import OutputExistsError, check_replaceable, is_complete

    # Where a link points to: the folder is built beside it, on the disk that it is meant for.
    out = Path(os.path.realpath(args.out))
    try:
        options = options_of(args)
    except ValueError as error:
        raise CommandError(str(error)) from error
    sweep_unfinished(out.parent)
    if is_complete(out, options) and not args.force:
        print(f"{out} is already complete with these options")
        return 0
    try:
        if not args.force:
            check_replaceable(out)
    except OutputExistsError as error:
        raise CommandError(str(error)) from error
    _require_reference_extra()
    # As an interrupt: what is half written is removed.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if isinstance(options, TinyOptions):
            _write_tiny(out, options, args.force)
        else:
            _write_synthetic(out, options, args.force)
    except OutputExistsError as error:
        raise CommandError(str(error)) from error
    except OSError as error:
        raise CommandError(f"cannot write {out}: {error.strerror or error}") from error
    print(f"wrote {out}")
    return 0


def _write_tiny(out: Path, options: TinyOptions, force: bool) -> None:
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


def _write_synthetic(out: Path, options: SyntheticOptions, force: bool) -> None:
    from tqdm import tqdm

    from ple_inference.synthetic.layout import files
    from ple_inference.synthetic.writer import NoRoomError, size_bytes, write_checkpoint
    from ple_inference.tiny.tokenizer import VocabularyError

    grouped = files(options)
    with tqdm(
        total=size_bytes(grouped),
        desc="synthetic checkpoint",
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        disable=None,
    ) as bar:
        try:
            write_checkpoint(out, options, grouped, force=force, progress=bar.update)
        except (NoRoomError, VocabularyError) as error:
            raise CommandError(str(error)) from error


def _require_reference_extra() -> None:
    missing = [name for name in ("torch", "transformers", "safetensors") if find_spec(name) is None]
    if missing:
        raise CommandError(f"{', '.join(missing)} not installed; install ple-inference[reference]")


if __name__ == "__main__":
    main()
