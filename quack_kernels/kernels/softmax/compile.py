"""The compile function of softmax: names and numbers in, compiled kernel out."""

from typing import Any

from cutlass import cute

from pytest_quack import jit_cache

from ...host.tensors import cute_dtype, fake_rows
from .config import host_config
from .host import HostSoftmax


@jit_cache
def compile_softmax(dtype: str, n: int) -> Any:
    """Compile the softmax of rows of `n` columns for CPU tensors.

    The kernel is called as `kernel(x, y)`: both are (M, n) of `dtype` with contiguous columns; M and row strides
    are free.

    Raises: ArgumentError for a dtype or an `n` that has no kernel.
    """
    element, rows = cute_dtype("dtype", dtype), cute.sym_int64()
    x, y = fake_rows(element, rows, n), fake_rows(element, rows, n)
    return cute.compile(HostSoftmax(host_config(n)), x, y, options="--enable-tvm-ffi")
