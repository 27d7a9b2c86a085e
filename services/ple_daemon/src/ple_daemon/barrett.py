"""Floor-mod of any int64 by a fixed divisor without dividing: hashing is bound by 16 remainders a token.

Barrett's reduction. With m = floor(2**64 / d) and u < 2**64, q = floor(u * m / 2**64) is floor(u / d) or one
less, so that u - q * d lies in [0, 2d). A negative x is read as u = x + 2**64, and floormod(x, d) =
floormod(u mod d - 2**64 mod d, d).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.extending import intrinsic


def reciprocals(divisors: Sequence[int]) -> npt.NDArray[np.uint64]:
    """floor(2**64 / d) of every divisor, each at least 2."""
    return np.array([2**64 // divisor for divisor in divisors], np.uint64)


def wraps(divisors: Sequence[int]) -> npt.NDArray[np.uint64]:
    """2**64 mod d of every divisor."""
    return np.array([2**64 % divisor for divisor in divisors], np.uint64)


def _define_multiply_high(_context: Any, first: Any, second: Any) -> Any:  # noqa: ARG001 - types, for numba
    """Upper 64 bits of a 128-bit product: one instruction, which numba has no name for."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        wide = ir.IntType(128)
        product = builder.mul(*(builder.zext(argument, wide) for argument in arguments))
        return builder.trunc(builder.lshr(product, ir.Constant(wide, 64)), ir.IntType(64))

    return types.uint64(types.uint64, types.uint64), generate


_multiply_high: Any = intrinsic(_define_multiply_high)


@njit(nogil=True, cache=True, inline="always")
def floor_mod(value: Any, divisor: Any, reciprocal: Any, wrap: Any) -> Any:
    """int64 `value` mod `divisor`, in [0, divisor); the other arguments and the result are uint64.

    No branches, which random tokens would mispredict: of r and r - d, the one that did not wrap is smaller.
    """
    unsigned = np.uint64(value)
    rest = unsigned - _multiply_high(unsigned, reciprocal) * divisor
    rest = min(rest, rest - divisor)
    rest -= wrap & np.uint64(value >> 63)
    return min(rest, rest + divisor)
