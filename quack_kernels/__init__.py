"""Row-wise kernels in CuTe DSL behind torch ops: `rmsnorm` and `softmax`.

    ops/        what users call: argument checks, torch op registration, output allocation, launch (needs torch)
    kernels/    one directory per kernel: config.py (pure), host.py and gpu.py (kernel code), compile.py (the compile
                function, which takes the device as an argument)
    host/       what kernels compiled for the host CPU share: row reductions, rounding to bfloat16
    gpu/        what kernels compiled for NVIDIA GPUs share: launches, row copies, reductions over threads and clusters
    tests/      the reference suite, run by `pytest --pyargs quack_kernels`

A call goes op -> compile function -> kernel. Only `ops/` knows torch, so a process that compiles imports
`quack_kernels.kernels.*.compile` without paying for torch. Names below resolve on first use; importing the
package costs milliseconds and touches no device.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from .errors import ArgumentError, QuackKernelsError
    from .ops.rmsnorm import rmsnorm
    from .ops.softmax import softmax

__all__ = ["ArgumentError", "QuackKernelsError", "rmsnorm", "softmax"]

_HOMES: Final = {
    "ArgumentError": "errors",
    "QuackKernelsError": "errors",
    "rmsnorm": "ops.rmsnorm",
    "softmax": "ops.softmax",
}


def __getattr__(name: str) -> Any:
    """Import the module that defines a public name and keep the name here."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it offers {', '.join(__all__)}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, resolved or not."""
    return sorted({*globals(), *__all__})
