"""RMSNorm forward on torch tensors."""

import torch

from ..kernels.rmsnorm.compile import compile_rmsnorm
from .checks import check_eps, check_operand, check_rows, check_weight
from .library import register
from .tensors import as_rows, as_vector, dtype_name


def rmsnorm(x: torch.Tensor, weight: torch.Tensor | None = None, *, eps: float = 1e-6) -> torch.Tensor:
    """Scale each row of x by the reciprocal of its root mean square, and each column by its weight.

    Shapes: x (..., N) with at least one dimension; weight (N,); the result is like x, and contiguous. Empty x gives
        an empty result. Rows may have any stride; x whose last dimension is not contiguous, or whose leading
        dimensions are not one stack of equally spaced rows, is copied first, as is a weight that is not contiguous.
    Dtypes: x float32 or bfloat16, on the CPU; weight float32 or the dtype of x; the result has the dtype of x.
    Error: everything is computed in float64 and rounded at the end, to bfloat16 by way of float32: at most 1 ulp of
        the output dtype from the float64 result rounded to it. NaN and infinity spread within their row only.
    Cost: two reads of x and one write of the result on one thread; the first call with a new N, dtype or weight dtype
        compiles a kernel, about 0.3 s, unless it is cached. Rows, strides and eps do not matter to that.
    Source: Zhang and Sennrich 2019, arXiv:1910.07467.
    Raises: ArgumentError, a ValueError, naming the argument, its value and what is accepted; also where x or weight
        requires a gradient while gradients are recorded, since there is no backward.
    """
    check_operand("x", x)
    if weight is not None:
        check_operand("weight", weight)
    y: torch.Tensor = _rmsnorm_op(x, weight, float(eps))
    return y


def _rmsnorm_meta(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Check the arguments and allocate the result."""
    check_rows(x)
    if weight is not None:
        check_weight(weight, x)
    check_eps(eps)
    return x.new_empty(x.shape)


def _rmsnorm_cpu(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    y = _rmsnorm_meta(x, weight, eps)
    if y.numel() > 0:
        weight_dtype = None if weight is None else dtype_name(weight.dtype)
        kernel = compile_rmsnorm(dtype_name(x.dtype), weight_dtype, x.shape[-1])
        kernel(as_rows(x), as_vector(weight), y.view(-1, x.shape[-1]), eps)
    return y


_rmsnorm_op = register("rmsnorm(Tensor x, Tensor? weight, float eps) -> Tensor", cpu=_rmsnorm_cpu, meta=_rmsnorm_meta)
