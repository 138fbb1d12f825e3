"""Softmax forward on torch tensors."""

from typing import Any

import torch

from ..kernels.softmax.compile import compile_softmax
from .checks import check_gpu, check_operand, check_rows
from .launch import device_type, launch, reach
from .library import register
from .tensors import as_rows, dtype_name


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Turn each row of x into positive weights that sum to 1, in proportion to the exponentials of its elements.

    Shapes: x (..., N) with at least one dimension, of which the last is normalised; the result is like x, and
        contiguous. Empty x gives an empty result. Rows may have any stride; x whose last dimension is not contiguous,
        or whose leading dimensions are not one stack of equally spaced rows, is copied first.
    Dtypes: on the CPU float32 or bfloat16; on a GPU (Hopper or newer; N up to 262,144) float16 too. The result has
        the dtype of x.
    Error: at most 1 ulp of the output dtype from the float64 result rounded to it, subnormal results included. On the
        CPU, and on a GPU for float32, everything after the maximum is computed in float64 and rounded at the end (on
        the CPU to bfloat16 by way of float32); on a GPU float32 serves for the shorter dtypes: of the difference to
        the maximum, its exponential and the sum, each is good to 2**-16, against 2**-9 and 2**-12 for half an ulp.
        A row with a NaN, with positive infinity or with nothing but negative infinity becomes NaN, as in
        torch.softmax.
    Cost: on a GPU one read of x and one write of the result, on the current stream. On the CPU three reads, two
        exponentials per element and one write, on one thread. The first call with a new N, dtype or device type
        compiles a kernel, about 1 s, unless it is cached; rows and strides do not matter to that.
    Source: the shift by the maximum, against overflow: Blanchard, Higham and Higham 2021, doi:10.1093/imanum/draa038.
    Raises: ArgumentError, a ValueError, naming the argument, its value and what is accepted; also where x requires a
        gradient while gradients are recorded, since there is no backward.
    """
    check_operand("x", x)
    y: torch.Tensor = _softmax_op(x)
    return y


def _allocate(x: torch.Tensor) -> torch.Tensor:
    """Check the argument and allocate the result."""
    check_rows(x, device_type(x))
    return x.new_empty(x.shape)


def _kernel(x: torch.Tensor) -> Any:
    return compile_softmax(device_type(x), dtype_name(x.dtype), x.shape[-1])


def _softmax_real(x: torch.Tensor) -> torch.Tensor:
    check_gpu(x.device)
    y = _allocate(x)
    if y.numel() > 0:
        launch(x.device, _kernel(x), as_rows(x), y.view(-1, x.shape[-1]))
    return y


def _softmax_fake(x: torch.Tensor) -> torch.Tensor:
    y = _allocate(x)
    reach(x, _kernel)
    return y


_softmax_op = register("softmax(Tensor x) -> Tensor", real=_softmax_real, fake=_softmax_fake)
