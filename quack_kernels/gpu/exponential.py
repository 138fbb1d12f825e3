"""2 ** t for float32 results that shall be good to a unit in the last place."""

import math
from typing import Any, Final

from cutlass import Float64, cute
from cutlass._mlir import ir
from cutlass._mlir.dialects import arith
from cutlass.cutlass_dsl import T, dsl_user_op

LOG2_E: Final = math.log2(math.e)

# Adding it leaves the nearest integer in the low bits of the significand, as two's complement.
_ROUNDER: Final = 1.5 * 2.0**52
# Taylor coefficients of 2 ** r, good to 2 ** -37 for |r| <= 1/2.
_COEFFICIENTS: Final = tuple(math.log(2.0) ** k / math.factorial(k) for k in range(10))
# Below it everything is 0: float32 ends at 2 ** -149, and the exponent of a float64 at 2 ** -1022.
_LEAST: Final = -1000.0


def exp2(t: Any) -> Any:
    """Return 2 ** t for a vector of float64 t <= 0, with a relative error of at most 2 ** -36; NaN stays NaN.

    For t below -1000 that is 0. Source: argument reduction to |r| <= 1/2 by adding 1.5 * 2**52, then Horner's
    rule (Muller, Elementary Functions, chapter 11).
    """
    rounded = t + Float64(_ROUNDER)
    r = t - (rounded - Float64(_ROUNDER))
    result = cute.full_like(r, _COEFFICIENTS[-1], Float64)
    for coefficient in reversed(_COEFFICIENTS[:-1]):
        result = result * r + Float64(coefficient)
    return cute.where(t < Float64(_LEAST), cute.full_like(t, 0.0, Float64), result * _power_of_two(rounded))


@dsl_user_op
def _power_of_two(rounded: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """Return 2 ** n for a vector of n + _ROUNDER, -1022 <= n <= 1023, by making n the exponent."""
    at = {"loc": loc, "ip": ip}
    integers = ir.VectorType.get([cute.size(rounded.shape)], T.i64())
    shift, bias = (
        arith.constant(integers, ir.DenseElementsAttr.get_splat(integers, ir.IntegerAttr.get(T.i64(), n)), **at)
        for n in (52, 1023 << 52)
    )
    exponent = arith.addi(arith.shli(arith.bitcast(integers, rounded, **at), shift, **at), bias, **at)
    return cute.TensorSSA(arith.bitcast(rounded.type, exponent, **at), rounded.shape, Float64)
