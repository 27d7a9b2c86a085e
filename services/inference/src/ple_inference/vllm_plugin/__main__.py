"""Composes the commands about overrides: `python -m ple_inference.vllm_plugin`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ple_inference.vllm_plugin import catalogue, vllm_diff
from ple_inference.vllm_plugin.override import OverrideError
from ple_inference.vllm_plugin.overrides import ALL
from ple_inference.vllm_plugin.proof import prove_sources
from ple_inference.vllm_plugin.wheel_source import WheelSource


def main() -> None:
    args = _parser().parse_args()
    try:
        code = args.run(args)
    except OverrideError as error:
        print(f"ple_inference.vllm_plugin: {error}", file=sys.stderr)
        code = 1
    sys.exit(code)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ple_inference.vllm_plugin",
        description="What the plugin changes in vLLM, without running it.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    docs = commands.add_parser("docs", help="print docs/overrides.md")
    docs.set_defaults(run=_docs)
    check = commands.add_parser("check", help="compare a vLLM with the records")
    check.add_argument("vllm", type=Path, nargs="?", help="wheel or folder (default: the installed one)")
    check.set_defaults(run=_check)
    diff = commands.add_parser(
        "diff", help="show what changed between two vLLMs in the symbols of the records"
    )
    diff.add_argument("old", type=Path, help="wheel or folder")
    diff.add_argument("new", type=Path, help="wheel or folder")
    diff.set_defaults(run=_diff)
    sha256 = commands.add_parser("sha256", help="print a record's entries for symbols")
    sha256.add_argument("vllm", type=Path, help="wheel or folder")
    sha256.add_argument("symbols", nargs="+", metavar="MODULE:NAME")
    sha256.set_defaults(run=_sha256)
    return parser


def _docs(_: argparse.Namespace) -> int:
    print(catalogue.markdown(ALL), end="")
    return 0


def _check(args: argparse.Namespace) -> int:
    source = WheelSource.at(args.vllm) if args.vllm else WheelSource.installed()
    prove_sources(ALL, source)
    print(f"{source.name}: all {sum(len(override.upstream) for override in ALL)} symbols are as recorded")
    return 0


def _diff(args: argparse.Namespace) -> int:
    found = list(vllm_diff.changes(WheelSource.at(args.old), WheelSource.at(args.new), ALL))
    for change in found:
        print(f"{change.verdict:8} {change.symbol}  ({', '.join(change.overrides)})")
        if change.diff:
            print(f"\n{change.diff}\n")
    differing = sum(change.verdict != "same" for change in found)
    print(f"{differing} of {len(found)} symbols differ")
    return 0


def _sha256(args: argparse.Namespace) -> int:
    source = WheelSource.at(args.vllm)
    for symbol in args.symbols:
        print(f'Upstream(\n    "{symbol}",\n    "{source.sha256(symbol)}",\n),')
    return 0


if __name__ == "__main__":
    main()
