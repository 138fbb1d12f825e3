"""The compile function of RMSNorm: names and numbers in, compiled kernel out."""

from typing import Any

from cutlass import Float64, cute

from pytest_quack import jit_cache

from ...host.tensors import cute_dtype, fake_rows, fake_vector
from .config import host_config
from .host import HostRmsNorm


@jit_cache
def compile_rmsnorm(dtype: str, weight_dtype: str | None, n: int) -> Any:
    """Compile the RMSNorm of rows of `n` columns for CPU tensors.

    The kernel is called as `kernel(x, weight, y, eps)`: x and y are (M, n) of `dtype` with contiguous columns,
    weight is contiguous (n,) of `weight_dtype`, or None where that is None; M, row strides and eps are free.

    Raises: ArgumentError for a dtype or an `n` that has no kernel.
    """
    element, rows = cute_dtype("dtype", dtype), cute.sym_int64()
    x, y = fake_rows(element, rows, n), fake_rows(element, rows, n)
    weight = None if weight_dtype is None else fake_vector(cute_dtype("weight_dtype", weight_dtype), n)
    return cute.compile(HostRmsNorm(host_config(n)), x, weight, y, Float64(0.0), options="--enable-tvm-ffi")
