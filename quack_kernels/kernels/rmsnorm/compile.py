"""The compile function of RMSNorm: names and numbers in, compiled kernel out."""

from typing import Any

from cutlass import Float64, cute

from pytest_quack import jit_cache

from ...fake_tensors import current_stream, cute_dtype, fake_rows, fake_vector
from .config import gpu_config, host_config
from .gpu import GpuRmsNorm
from .host import HostRmsNorm


@jit_cache
def compile_rmsnorm(device: str, dtype: str, weight_dtype: str | None, n: int) -> Any:
    """Compile the RMSNorm of rows of `n` columns for tensors on `device`, which is "cpu" or "cuda".

    The kernel is called as `kernel(x, weight, y, eps)`: x and y are (M, n) of `dtype` with contiguous columns,
    weight is contiguous (n,) of `weight_dtype`, or None where that is None; M, row strides and eps are free.

    Raises: ArgumentError for a device, a dtype or an `n` that has no kernel.
    """
    element, rows = cute_dtype(device, "dtype", dtype), cute.sym_int64()
    x, y = fake_rows(device, element, rows, n), fake_rows(device, element, rows, n)
    weight = None
    if weight_dtype is not None:
        weight = fake_vector(device, cute_dtype(device, "weight_dtype", weight_dtype), n)
    if device == "cpu":
        return cute.compile(HostRmsNorm(host_config(n)), x, weight, y, Float64(0.0), options="--enable-tvm-ffi")
    kernel = GpuRmsNorm(gpu_config(n, element.width // 8), element)
    return cute.compile(kernel, x, weight, y, Float64(0.0), current_stream(), options="--enable-tvm-ffi")
