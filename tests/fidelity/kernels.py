"""What generated suites call: kernels that must be compiled, in every kind of place, and noise of every kind.

FIDELITY_KERNELS says of which kind the kernels are: "light" ones need no compiler, "cute" ones are functions of the
CuTe DSL for the host. FIDELITY_DEPTH says how many further kernels each call needs first, one after the other, so that
a test that calls one is put off so often more.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable, Coroutine
from typing import Any

from support import light
from support.light import log

__all__ = ["call", "call_bad", "in_thread", "log", "noise", "run", "through_autograd", "through_custom_op"]

DEPTH = int(os.environ.get("FIDELITY_DEPTH", "0"))
if os.environ.get("FIDELITY_KERNELS") == "cute":
    from fidelity.cute_kernels import build
else:

    def build(name: str, seconds: float) -> Callable[[], float]:
        return light.build(name, seconds=seconds)


def call(name: str, seconds: float = 0.0) -> float:
    """Call a kernel; its value is 1.0."""
    for number in range(DEPTH):
        light.build(f"{name}_before{number}", seconds=seconds / 2)()
    return build(name, seconds)()


def call_bad(name: str) -> None:
    """Call a kernel that does not compile."""
    light.build_badly(name, "raise")()


def noise(text: str) -> None:
    """Say something in every way there is."""
    print(text)
    print(text, file=sys.stderr)
    logging.getLogger("suite").warning("%s", text)
    warnings.warn(text, UserWarning, stacklevel=2)


def in_thread(function: Callable[[], float]) -> float:
    values = []
    thread = threading.Thread(target=lambda: values.append(function()))
    thread.start()
    thread.join()
    return values[0]


def run(main: Coroutine[Any, Any, float]) -> float:
    return asyncio.run(main)


def through_autograd(function: Callable[[], float]) -> float:
    """Have autograd call it, in a backward pass."""
    import torch

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * function()

    x = torch.zeros((), requires_grad=True)
    Function.apply(x).backward()
    return float(x.grad)


def through_custom_op(name: str) -> float:
    """Have a custom op of torch call a kernel."""
    import torch

    return float(torch.ops.fidelity.call(torch.zeros(()), name))


if os.environ.get("FIDELITY_KERNELS") == "cute":
    import torch

    @torch.library.custom_op("fidelity::call", mutates_args=())
    def _call(x: torch.Tensor, name: str) -> torch.Tensor:
        return x + call(name)
