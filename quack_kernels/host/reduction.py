"""Reductions over one row in host kernels."""

from collections.abc import Callable
from typing import Any

from cutlass import Constexpr, Float64, cute, range_constexpr

from ..merge import merge

Step = Callable[[Float64, Float64], Any]


@cute.jit
def fold_row(gX: cute.Tensor, config: Constexpr, initial: Constexpr, step: Constexpr, combine: Constexpr) -> Float64:
    """Fold the elements of the row `gX`, widened to float64, to one value.

    `config` is a RowConfig. Each of its `unroll` partial results starts as the float `initial` and takes every
    `unroll`-th element by `partial = step(partial, element)`; `combine` merges them, pairwise and in a fixed order.
    """
    partials = [Float64(initial)] * config.unroll
    for block in range(config.whole_blocks):
        for u in range_constexpr(config.unroll):
            partials[u] = step(partials[u], gX[block * config.unroll + u].to(Float64))
    for u in range_constexpr(config.n - config.tail_start):
        partials[u] = step(partials[u], gX[config.tail_start + u].to(Float64))
    return merge(partials, combine)


def add(a: Float64, b: Float64) -> Any:
    """Return the sum."""
    return a + b


@cute.jit
def larger(a: Float64, b: Float64) -> Float64:
    """Return the larger value, and `b` where either is NaN."""
    return a if a > b else b
