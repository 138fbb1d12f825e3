"""Stand-ins for tensors, with which a kernel is compiled before any tensor exists."""

from typing import Any, Final

import cutlass
from cutlass import cute

from .devices import dtypes_of
from .errors import ArgumentError

_CUTE_DTYPES: Final[dict[str, Any]] = {
    "float32": cutlass.Float32,
    "bfloat16": cutlass.BFloat16,
    "float16": cutlass.Float16,
}
_MEMORY: Final = {"cpu": cute.AddressSpace.generic, "cuda": cute.AddressSpace.gmem}


def cute_dtype(device: str, argument: str, name: str) -> Any:
    """Return the DSL type of a dtype name such as `"float32"`; ArgumentError names `argument`."""
    accepted = dtypes_of(device)
    if name not in accepted:
        raise ArgumentError(argument, f"is {name!r}", f"{device} kernels accept {', '.join(accepted)}")
    return _CUTE_DTYPES[name]


def fake_rows(device: str, dtype: Any, rows: Any, n: int) -> Any:
    """Return a fake (rows, n) tensor whose row stride is any 64-bit number and whose columns are contiguous.

    `rows` is a `cute.sym_int64()`: two tensors that share it must agree on it at run time. Nothing is assumed of the
    alignment of rows beyond that of an element.
    """
    return cute.runtime.make_fake_tensor(dtype, (rows, n), (cute.sym_int64(), 1), memspace=_MEMORY[device])


def fake_vector(device: str, dtype: Any, n: int) -> Any:
    """Return a fake contiguous (n,) tensor."""
    return cute.runtime.make_fake_tensor(dtype, (n,), (1,), memspace=_MEMORY[device])


def current_stream() -> Any:
    """Return a fake stream: the kernel is launched on the stream that torch uses when it is called."""
    return cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
