"""RMSNorm forward on torch tensors."""

from typing import Any

import torch

from ..kernels.rmsnorm.compile import compile_rmsnorm
from .checks import check_eps, check_gpu, check_operand, check_rows, check_weight
from .launch import device_type, launch, reach
from .library import register
from .tensors import as_rows, as_vector, dtype_name


def rmsnorm(x: torch.Tensor, weight: torch.Tensor | None = None, *, eps: float = 1e-6) -> torch.Tensor:
    """Scale each row of x by the reciprocal of its root mean square, and each column by its weight.

    Shapes: x (..., N) with at least one dimension; weight (N,); the result is like x, and contiguous. Empty x gives
        an empty result. Rows may have any stride; x whose last dimension is not contiguous, or whose leading
        dimensions are not one stack of equally spaced rows, is copied first, as is a weight that is not contiguous.
    Dtypes: x on the CPU float32 or bfloat16; on a GPU (Hopper or newer; N up to 262,144) float16 too; weight float32
        or the dtype of x; the result has the dtype of x.
    Error: at most 1 ulp of the output dtype from the float64 result rounded to it. On the CPU, and on a GPU for
        float32, everything is computed in float64 and rounded at the end (on the CPU to bfloat16 by way of float32).
        On a GPU the shorter dtypes are multiplied in float32, which adds three roundings of 2**-24 each: the scale,
        the product with it, the product with the weight. Their squares are summed in float64 (bfloat16) or float32
        (float16, whose squares stay in its range: fewer than 2**6 additions one after the other, so 2**-18, of which
        the root halves the error). Half an ulp is 2**-9 and 2**-12. The exception: where a bfloat16 element is below
        2**-126 after scaling and before its weight, float32 has fewer bits for it.
        NaN and infinity spread within their row only.
    Cost: on a GPU one read of x and one write of the result, on the current stream; the weight is read from the L2
        cache once for each row. On the CPU two reads and one write on one thread. The first call with a new N, dtype,
        weight dtype or device type compiles a kernel, about 1 s, unless it is cached; rows, strides and eps do not
        matter to that.
    Source: Zhang and Sennrich 2019, arXiv:1910.07467.
    Raises: ArgumentError, a ValueError, naming the argument, its value and what is accepted; also where x or weight
        requires a gradient while gradients are recorded, since there is no backward.
    """
    check_operand("x", x)
    if weight is not None:
        check_operand("weight", weight)
    check_eps(eps)
    y: torch.Tensor = _rmsnorm_op(x, weight, float(eps))
    return y


def _allocate(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Check the arguments and allocate the result."""
    check_rows(x, device_type(x))
    if weight is not None:
        check_weight(weight, x)
    check_eps(eps)
    return x.new_empty(x.shape)


def _kernel(x: torch.Tensor, weight: torch.Tensor | None) -> Any:
    weight_dtype = None if weight is None else dtype_name(weight.dtype)
    return compile_rmsnorm(device_type(x), dtype_name(x.dtype), weight_dtype, x.shape[-1])


def _rmsnorm_real(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    check_gpu(x.device)
    y = _allocate(x, weight, eps)
    if y.numel() > 0:
        launch(x.device, _kernel(x, weight), as_rows(x), as_vector(weight), y.view(-1, x.shape[-1]), eps)
    return y


def _rmsnorm_fake(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    y = _allocate(x, weight, eps)
    reach(x, _kernel, weight)
    return y


_rmsnorm_op = register("rmsnorm(Tensor x, Tensor? weight, float eps) -> Tensor", real=_rmsnorm_real, fake=_rmsnorm_fake)
