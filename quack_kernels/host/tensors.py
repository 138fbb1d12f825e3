"""Stand-ins for CPU tensors, with which a kernel is compiled before any tensor exists."""

from typing import Any, Final

import cutlass
from cutlass import cute

from ..errors import ArgumentError

CUTE_DTYPES: Final[dict[str, Any]] = {"float32": cutlass.Float32, "bfloat16": cutlass.BFloat16}


def cute_dtype(argument: str, name: str) -> Any:
    """Return the DSL type of a dtype name such as `"float32"`; ArgumentError names `argument`."""
    if name not in CUTE_DTYPES:
        raise ArgumentError(argument, f"is {name!r}", f"host kernels accept {', '.join(CUTE_DTYPES)}")
    return CUTE_DTYPES[name]


def fake_rows(dtype: Any, rows: Any, n: int) -> Any:
    """Return a fake (rows, n) tensor whose row stride is any 64-bit number and whose columns are contiguous.

    `rows` is a `cute.sym_int64()`: two tensors that share it must agree on it at run time.
    """
    return _fake(dtype, (rows, n), (cute.sym_int64(), 1))


def fake_vector(dtype: Any, n: int) -> Any:
    """Return a fake contiguous (n,) tensor."""
    return _fake(dtype, (n,), (1,))


def _fake(dtype: Any, shape: tuple[Any, ...], stride: tuple[Any, ...]) -> Any:
    return cute.runtime.make_fake_tensor(dtype, shape, stride, memspace=cute.AddressSpace.generic)
