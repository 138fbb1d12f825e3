"""How host kernels round their float64 results to the output dtype.

LLVM turns a float32 -> bfloat16 conversion into a call of `__truncsfbf2` on every x86-64 processor without
AVX512_BF16, and libgcc has that function only since version 13; where it is missing a compiled kernel does not
load. So bfloat16 is made here by integer arithmetic, which gives the same bits everywhere. The way back needs
nothing of the kind: bfloat16 -> float32 is a shift by 16 bits and LLVM does it inline.
"""

from typing import Any

from cutlass import BFloat16, Float32, Float64, Uint16, Uint32, const_expr, cute
from cutlass._mlir.dialects import arith
from cutlass.cutlass_dsl import T, dsl_user_op


@dsl_user_op
def float32_bits(value: Float32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """Return the 32 bits of a float32 as an unsigned integer."""
    return Uint32(arith.bitcast(T.i32(), Float32(value).ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


@cute.jit
def bfloat16_bits(value: Float32) -> Uint16:
    """Return the bits of the bfloat16 nearest to `value`, ties to even; NaN stays NaN and overflow becomes inf.

    Adding just under half a unit of the kept part, plus its lowest bit, carries into the kept part exactly when
    round-to-nearest-even rounds up; a carry out of the significand moves to the exponent, up to infinity. A NaN
    would carry likewise, so it is cut off instead, with the quiet bit set lest its payload was in the cut part.
    """
    bits = float32_bits(value)
    high = bits >> 16
    rounded = (bits + Uint32(0x7FFF) + (high & Uint32(1))) >> 16
    is_nan = (bits & Uint32(0x7FFFFFFF)) > Uint32(0x7F800000)
    result = (high | Uint32(0x40)) if is_nan else rounded
    return result.to(Uint16)


@cute.jit
def store_view(mY: cute.Tensor) -> cute.Tensor:
    """Return `mY` as `store` takes it: bfloat16 as 16-bit integers, anything else as it is."""
    return cute.recast_tensor(mY, Uint16) if const_expr(mY.element_type is BFloat16) else mY


@cute.jit
def store(gY: cute.Tensor, column: Any, value: Float64) -> None:
    """Round `value` to the dtype of `gY`, a row of a `store_view`, and write it."""
    if const_expr(gY.element_type is Uint16):
        gY[column] = bfloat16_bits(value.to(Float32))
    else:
        gY[column] = value.to(gY.element_type)
