"""Softmax forward for CPU tensors: one thread, one row after the other, three passes over each row.

`exp` is the C library's, in float64, called as the object's one outside symbol. In float32 the result could not be
good to a unit in the last place: rounding `x - maximum` alone costs a relative error of |x - maximum| * 2**-24.
"""

from cutlass import Float64, cute

from ...host.config import RowConfig
from ...host.reduction import add, fold_row, larger
from ...host.rounding import store, store_view


class HostSoftmax:
    """`mY = exp(mX - max(mX)) / sum(exp(mX - max(mX)))` by rows, in float64 up to the one rounding at the store."""

    def __init__(self, config: RowConfig) -> None:
        """Take what the kernel is specialised on beside the tensor types."""
        self.config = config

    @cute.jit
    def __call__(self, mX: cute.Tensor, mY: cute.Tensor) -> None:
        """Normalise every row of mX (M, N) into mY (M, N)."""
        mY = store_view(mY)
        for row in range(mX.shape[0]):
            gX, gY = mX[row, None], mY[row, None]
            maximum = fold_row(gX, self.config, -float("inf"), larger, larger)
            self.scale_row(gX, gY, maximum, self.reciprocal_sum(gX, maximum))

    @cute.jit
    def reciprocal_sum(self, gX: cute.Tensor, maximum: Float64) -> Float64:
        """Return 1 / sum(exp(gX - maximum))."""
        total = fold_row(gX, self.config, 0.0, lambda partial, x: partial + cute.math.exp(x - maximum), add)
        return Float64(1.0) / total

    @cute.jit
    def scale_row(self, gX: cute.Tensor, gY: cute.Tensor, maximum: Float64, scale: Float64) -> None:
        """Write exp(gX - maximum) * scale; exp is computed again, which is cheaper than a float64 copy of the row."""
        for column in range(self.config.n):
            store(gY, column, cute.math.exp(gX[column].to(Float64) - maximum) * scale)
