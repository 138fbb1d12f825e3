"""From an op to its kernel: launching it on the tensors' device, or only compiling it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor

# What each `compile_only` that is under way has reached, the innermost last; for all threads, since tests start some.
_reached: Final[list[dict[int, Any]]] = []


@contextmanager
def compile_only() -> Iterator[dict[int, Any]]:
    """Make ops on fake tensors (`FakeTensorMode`) compile and load the kernels that they would launch on a GPU.

    A fake tensor stands for one on a GPU whatever its device, since a torch built without CUDA can do little with fake
    CUDA tensors. No GPU is needed; CUTE_DSL_ARCH names the one to compile for. Yields a dictionary that holds one entry
    for each kernel reached so far.
    """
    reached: dict[int, Any] = {}
    _reached.append(reached)
    try:
        yield reached
    finally:
        _reached.pop()


def device_type(x: torch.Tensor) -> str:
    """Return the type of the device that x is on, or that it stands for."""
    return "cuda" if _reached and isinstance(x, FakeTensor) else x.device.type


def reach(x: torch.Tensor, kernel: Callable[..., Any], *args: Any) -> None:
    """Compile `kernel(x, *args)` for a fake tensor x with elements if only that is asked for; else do nothing."""
    if _reached and isinstance(x, FakeTensor) and x.numel() > 0:
        compiled = kernel(x, *args)
        _reached[-1][id(compiled)] = compiled


def launch(device: torch.device, kernel: Any, *args: Any) -> None:
    """Call a kernel with `device` as the current one: it launches on the current device's current stream."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            kernel(*args)
    else:
        kernel(*args)
