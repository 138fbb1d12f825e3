"""RMSNorm forward for CPU tensors: one thread, one row after the other, two passes over each row."""

from typing import Any

from cutlass import Float64, const_expr, cute

from ...host.config import RowConfig
from ...host.reduction import add, fold_row
from ...host.rounding import store, store_view


class HostRmsNorm:
    """`mY = mX / sqrt(mean(mX ** 2) + eps) * mW` by rows, in float64 up to the one rounding at the store."""

    def __init__(self, config: RowConfig) -> None:
        """Take what the kernel is specialised on beside the tensor types."""
        self.config = config

    @cute.jit
    def __call__(self, mX: cute.Tensor, mW: cute.Tensor | None, mY: cute.Tensor, eps: Float64) -> None:
        """Normalise every row of mX (M, N) into mY (M, N); mW is (N,) or None."""
        mY = store_view(mY)
        for row in range(mX.shape[0]):
            gX, gY = mX[row, None], mY[row, None]
            self.scale_row(gX, mW, gY, self.reciprocal_rms(gX, eps))

    @cute.jit
    def reciprocal_rms(self, gX: cute.Tensor, eps: Float64) -> Float64:
        """Return 1 / sqrt(mean(gX ** 2) + eps)."""
        total = fold_row(gX, self.config, 0.0, lambda partial, x: partial + x * x, add)
        return Float64(1.0) / cute.math.sqrt(total / Float64(self.config.n) + eps)

    @cute.jit
    def scale_row(self, gX: cute.Tensor, mW: Any, gY: cute.Tensor, rstd: Float64) -> None:
        """Write gX * rstd * mW, or gX * rstd where mW is None."""
        for column in range(self.config.n):
            value = gX[column].to(Float64) * rstd
            if const_expr(mW is not None):
                value = value * mW[column].to(Float64)
            store(gY, column, value)
