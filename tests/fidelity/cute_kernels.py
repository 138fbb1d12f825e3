"""Kernels of the CuTe DSL for generated suites, compiled for the host: each name is a kernel of its own."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import cutlass.cute as cute
import torch
from cutlass import AddressSpace, Constexpr, Float32

from pytest_quack import jit_cache


@cute.jit
def _one(y: cute.Tensor, number: Constexpr):
    for i in range(cute.size(y)):
        y[i] = Float32(number) / Float32(number)


@jit_cache
def _compile(number: int):
    y = cute.runtime.make_fake_compact_tensor(Float32, (cute.sym_int(),), memspace=AddressSpace.generic)
    return cute.compile(_one, y, number, options="--enable-tvm-ffi")


def build(name: str, seconds: float) -> Callable[[], float]:
    """A kernel whose value is 1.0; it takes as long to compile as it takes."""
    compiled = _compile(zlib.crc32(name.encode()) % 10_000 + 1)

    def kernel() -> float:
        y = torch.zeros(3)
        compiled(y)
        return float(y.mean())

    return kernel
