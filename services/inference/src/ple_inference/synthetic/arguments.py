"""The arguments of `ple-inference tiny`, and the options that they make."""

from __future__ import annotations

import argparse
from pathlib import Path

from ple_inference.synthetic.options import SyntheticOptions
from ple_inference.tiny.config import TinyOptions

EXAMPLES = """examples:
  ple-inference tiny var/models/triplex-tiny
  ple-inference tiny /tmp/t --vocab tiny --dtype f32 --table-rows-base 2000
  ple-inference tiny /models/int4 --shapes real --quant int4-mixed --layers 8
  ple-inference tiny /models/fp8 --shapes real --quant fp8 --layers 4 --experts 128 --images
"""


def add_arguments(tiny: argparse.ArgumentParser) -> None:
    tiny.add_argument("out", type=Path, metavar="OUT", help="folder to make")
    tiny.add_argument(
        "--vocab", choices=("real", "tiny"), default="real", help="248,320 or 512 ids (default real)"
    )
    tiny.add_argument("--dtype", choices=("bf16", "f32"), default="bf16", help="of weights and table rows")
    tiny.add_argument("--seed", type=int, default=0, help="other seed, other weights (default 0)")
    tiny.add_argument(
        "--layers", type=int, help="decoder layers, a multiple of 4 (default 4; real shapes: 8)"
    )
    tiny.add_argument(
        "--table-rows-base",
        type=int,
        help="ngram_vocab_size_base; the table gets about 16 times as many rows "
        "(default 13200; real shapes: 200000; released: 20000000)",
    )
    tiny.add_argument("--force", action="store_true", help="replace what OUT holds")
    vllm = tiny.add_argument_group("for the vllm engine, and not for the reference engine")
    vllm.add_argument(
        "--quant", choices=("none", "int4-mixed", "fp8"), default="none", help="as the release of that name"
    )
    vllm.add_argument("--shapes", choices=("tiny", "real"), default="tiny", help="real: those of the release")
    vllm.add_argument("--experts", type=int, help="experts of a layer (default 16; real shapes: 512)")
    vllm.add_argument(
        "--images",
        action="store_true",
        help="with vision tower, draft module and tokenizer, as released; without, the text model alone",
    )
    vllm.add_argument(
        "--scale-dtype", choices=("fp16", "bf16"), help="goes with --quant int4-mixed (default fp16)"
    )


def options_of(args: argparse.Namespace) -> TinyOptions | SyntheticOptions:
    """What is to be made. Raises ValueError."""
    real = args.shapes == "real"
    layers = (8 if real else 4) if args.layers is None else args.layers
    table_rows_base = (200_000 if real else 13_200) if args.table_rows_base is None else args.table_rows_base
    if args.scale_dtype is not None and args.quant != "int4-mixed":
        raise ValueError(
            f"--scale-dtype {args.scale_dtype} goes with --quant int4-mixed: others have no such scales"
        )
    if real or args.quant != "none":
        if args.dtype != "bf16":
            raise ValueError("--dtype f32 goes with neither --quant nor --shapes real")
        experts = (512 if real else 16) if args.experts is None else args.experts
        return SyntheticOptions(
            quant=args.quant,
            shapes=args.shapes,
            layers=layers,
            experts=experts,
            table_rows_base=table_rows_base,
            vocab=args.vocab,
            images=args.images,
            scale_dtype=args.scale_dtype or "fp16",
            seed=args.seed,
        )
    if args.images or args.experts is not None:
        raise ValueError("--images and --experts go with --quant or --shapes real")
    return TinyOptions(args.vocab, args.dtype, args.seed, layers, table_rows_base)
