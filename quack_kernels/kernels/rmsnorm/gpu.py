"""RMSNorm forward for CUDA tensors: one read and one write of each row, which stays in registers in between."""

import operator
from typing import Any

from cutlass import BFloat16, Constexpr, Float16, Float32, Float64, const_expr, cute

from ...gpu.config import MAX_THREADS, RowLaunch
from ...gpu.reduction import PartialResults, local_fold, row_sum
from ...gpu.rows import launch_of, load_columns, position, shift_of, store_columns


class GpuRmsNorm:
    """`mY = mX / sqrt(mean(mX ** 2) + eps) * mW` by rows.

    Squares of float32 and bfloat16 numbers may leave the range of float32, so they are summed in float64; those of
    float16 may not. The products are float64 for float32 results and float32 for shorter ones.
    """

    def __init__(self, config: RowLaunch, dtype: Any) -> None:
        """Take what the kernel is specialised on; `dtype` is that of mX and mY."""
        self.config = config
        self.acc = Float32 if dtype is Float16 else Float64
        self.product = Float64 if dtype is Float32 else Float32
        self.has_tiny_rows = dtype is BFloat16
        self.partials = PartialResults(config, (self.acc,))

    @cute.jit
    def __call__(self, mX: cute.Tensor, mW: cute.Tensor | None, mY: cute.Tensor, eps: Float64, stream: Any) -> None:
        """Normalise every row of mX (M, N) into mY (M, N); mW is (N,) or None."""
        self.kernel(mX, mW, mY, eps).launch(**launch_of(self.config, mX.shape[0]), stream=stream)

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mW: cute.Tensor | None, mY: cute.Tensor, eps: Float64) -> None:
        """Work on the rows of one CTA."""
        config = self.config
        buffers = self.partials.allocate()
        self.partials.begin()
        row, is_row, thread, column = position(mX.shape[0], config)
        gX, gY = mX[row, None], mY[row, None]
        shift = shift_of(gX, config)
        rX = load_columns(gX, thread, column, shift, config, 0.0)
        # The weight comes from the L2 cache; where registers are many, it waits in them for the row's sum.
        rW: Any = None
        if const_expr(mW is not None and config.threads < MAX_THREADS):
            rW = load_columns(mW, thread, column, shift, config, 0.0)
        rstd = self.reciprocal_rms(rX.load(), eps, buffers)
        if const_expr(mW is not None and config.threads == MAX_THREADS):
            rW = load_columns(mW, thread, column, shift, config, 0.0)
        x = rX.load().to(self.product)
        if const_expr(self.has_tiny_rows):
            rstd, x = self.keep_in_range(rstd, x)
        y = x * rstd.to(self.product)
        if const_expr(mW is not None):
            y = y * rW.load().to(self.product)
        rX.store(y.to(mY.element_type))
        if is_row:
            store_columns(rX, gY, thread, column, shift, config)

    @cute.jit
    def reciprocal_rms(self, x: Any, eps: Float64, buffers: Constexpr) -> Float64:
        """Return 1 / sqrt(mean(x ** 2) + eps) of the row."""
        x = x.to(self.acc)
        total = row_sum(local_fold(x * x, operator.add), buffers, self.partials)
        return Float64(1.0) / cute.math.sqrt(total.to(Float64) / Float64(self.config.n) + eps)

    @cute.jit
    def keep_in_range(self, rstd: Float64, x: Any) -> tuple[Float64, Any]:
        """Return both with the same product, and rstd in the range of float32, which ends at 2 ** 128.

        Rows of subnormal bfloat16 numbers have an rstd of up to 2 ** 142, where eps is as good as zero.
        """
        factor = Float32(1.0)
        if rstd > Float64(2.0**100):
            factor = Float32(2.0**64)
            rstd = rstd * Float64(2.0**-64)
        return rstd, x * factor
