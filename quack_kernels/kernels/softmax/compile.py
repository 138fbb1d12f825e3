"""The compile function of softmax: names and numbers in, compiled kernel out."""

from typing import Any

from cutlass import cute

from pytest_quack import jit_cache

from ...fake_tensors import current_stream, cute_dtype, fake_rows
from .config import gpu_config, host_config
from .gpu import GpuSoftmax
from .host import HostSoftmax


@jit_cache
def compile_softmax(device: str, dtype: str, n: int) -> Any:
    """Compile the softmax of rows of `n` columns for tensors on `device`, which is "cpu" or "cuda".

    The kernel is called as `kernel(x, y)`: both are (M, n) of `dtype` with contiguous columns; M and row strides
    are free.

    Raises: ArgumentError for a device, a dtype or an `n` that has no kernel.
    """
    element, rows = cute_dtype(device, "dtype", dtype), cute.sym_int64()
    x, y = fake_rows(device, element, rows, n), fake_rows(device, element, rows, n)
    if device == "cpu":
        return cute.compile(HostSoftmax(host_config(n)), x, y, options="--enable-tvm-ffi")
    kernel = GpuSoftmax(gpu_config(n, element.width // 8), element)
    return cute.compile(kernel, x, y, current_stream(), options="--enable-tvm-ffi")
