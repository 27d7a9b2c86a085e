"""Arguments of vLLM that change a profile, so that what is checked and planned is what runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

from ple_inference.vllm_engine.profile import Profile
from ple_inference.vllm_engine.refused import Refused


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Refused(f"after the --: {message}")


def take_in(profile: Profile, extra: Sequence[str]) -> tuple[Profile, tuple[str, ...]]:
    """The profile as `extra` changes it, and the arguments that it knows nothing of. Raises Refused."""
    # vLLM takes any unambiguous beginning of a name, and so must this.
    parser = _Parser(add_help=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("--gpu-memory-utilization", type=float)
    parser.add_argument("--kv-cache-dtype", choices=("auto", "bfloat16", "fp8", "fp8_e4m3"))
    parser.add_argument("--max-num-batched-tokens", type=int)
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument(
        "--enable-prefix-caching", action=argparse.BooleanOptionalAction, dest="prefix_caching"
    )
    changes, rest = parser.parse_known_args([_dashed(argument) for argument in extra])
    try:
        return replace(profile, **vars(changes)), tuple(rest)
    except ValueError as error:
        raise Refused(f"after the --: {error}") from error


def _dashed(argument: str) -> str:
    """vLLM takes --max_num_seqs for --max-num-seqs."""
    flag, equals, value = argument.partition("=")
    return flag.replace("_", "-") + equals + value if flag.startswith("--") else argument
