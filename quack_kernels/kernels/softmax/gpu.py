"""Softmax forward for CUDA tensors: one read and one write of each row, which stays in registers in between."""

import operator
from typing import Any

from cutlass import BFloat16, Constexpr, Float32, Float64, const_expr, cute

from ...gpu.config import RowLaunch
from ...gpu.exponential import LOG2_E, exp2
from ...gpu.reduction import PartialResults, lanes_of, local_fold, warp_max, warp_sum
from ...gpu.rows import launch_of, load_columns, position, shift_of, store_columns
from ...merge import merge


class GpuSoftmax:
    """`mY = exp(mX - max(mX)) / sum(exp(mX - max(mX)))` by rows.

    Each warp takes exponentials relative to its own maximum, so that one exchange between warps gives both the row's
    maximum and its sum. For float32 results everything after the maximum is float64; for shorter ones float32 does.
    """

    def __init__(self, config: RowLaunch, dtype: Any) -> None:
        """Take what the kernel is specialised on; `dtype` is that of mX and mY."""
        self.config = config
        self.dtype = dtype
        self.acc = Float64 if dtype is Float32 else Float32
        self.partials = PartialResults(config, (Float32, self.acc))

    @cute.jit
    def __call__(self, mX: cute.Tensor, mY: cute.Tensor, stream: Any) -> None:
        """Normalise every row of mX (M, N) into mY (M, N)."""
        self.kernel(mX, mY).launch(**launch_of(self.config, mX.shape[0]), stream=stream)

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mY: cute.Tensor) -> None:
        """Work on the rows of one CTA."""
        config = self.config
        buffers = self.partials.allocate()
        self.partials.begin()
        row, is_row, thread, column = position(mX.shape[0], config)
        gX, gY = mX[row, None], mY[row, None]
        shift = shift_of(gX, config)
        rX = load_columns(gX, thread, column, shift, config, -Float32.inf)
        exponentials, scale = self.normalise(rX.load().to(Float32), buffers)
        rX.store((exponentials * scale).to(mY.element_type))
        if is_row:
            store_columns(rX, gY, thread, column, shift, config)

    @cute.jit
    def normalise(self, x: Any, buffers: Constexpr) -> tuple[Any, Any]:
        """Return exponentials of the thread's elements and the number to multiply them by."""
        lanes = lanes_of(self.config)
        maximum = warp_max(local_fold(x, cute.arch.fmax), lanes)
        exponentials = self.exp2((x.to(self.acc) - finite_or_zero(maximum).to(self.acc)) * self.acc(LOG2_E))
        total = warp_sum(local_fold(exponentials, operator.add), lanes)
        scale = self.acc(1.0)
        if const_expr(self.partials.is_needed):
            self.partials.exchange(buffers, (maximum, total))
            row_maximum, total = self.combine(buffers)
            scale = self.scale(maximum, row_maximum)
        return exponentials, scale / total

    @cute.jit
    def combine(self, buffers: Constexpr) -> tuple[Any, Any]:
        """Return the row's maximum and the sum of its exponentials, from those of all warps."""
        maxima = self.partials.read(buffers[0], -Float32.inf)
        totals = self.partials.read(buffers[1], 0.0)
        maximum = warp_max(merge(maxima, cute.arch.fmax), self.partials.lanes)
        scaled = [total * self.scale(own, maximum) for own, total in zip(maxima, totals, strict=True)]
        return maximum, warp_sum(merge(scaled, operator.add), self.partials.lanes)

    @cute.jit
    def scale(self, maximum: Float32, row_maximum: Float32) -> Any:
        """Return exp(maximum - row_maximum): from exponentials relative to one to those relative to the other."""
        difference = maximum.to(self.acc) - finite_or_zero(row_maximum).to(self.acc)
        t = cute.make_rmem_tensor(1, self.acc)
        t[0] = difference * self.acc(LOG2_E)
        return self.exp2(t.load())[0]

    @cute.jit
    def exp2(self, t: Any) -> Any:
        """Return 2 ** t in the accumulator's dtype."""
        if const_expr(self.acc is Float64):
            return exp2(t)
        # The hardware's own is fast and makes subnormal results 0, of which only bfloat16 has any.
        return cute.math.exp2(t, fastmath=self.dtype is not BFloat16)


@cute.jit
def finite_or_zero(maximum: Float32) -> Float32:
    """Return a maximum to subtract: 0 for that of nothing but negative infinity, whose exponentials are then 0."""
    return Float32(0.0) if maximum == -Float32.inf else maximum
