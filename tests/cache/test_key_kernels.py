"""Canonical bytes of what kernels are parametrized with: dtypes, layouts, kernel functions; and the refusal of data."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from pytest_quack.cache.key import encode
from pytest_quack.cache.reach import Reach
from pytest_quack.errors import UnkeyableError
from support.inner import ROOT

torch = pytest.importorskip("torch")
cutlass = pytest.importorskip("cutlass")
cute = pytest.importorskip("cutlass.cute")


def kernel(k: int) -> Callable[..., Any]:
    @cute.jit  # type: ignore[misc, untyped-decorator, unused-ignore] - the DSL's decorators have no types
    def add(x: cutlass.Int32) -> cutlass.Int32:
        return x + k

    return add  # type: ignore[no-any-return, unused-ignore]


DIFFERENT = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    cutlass.Float32,
    cutlass.Float16,
    cutlass.BFloat16,
    cutlass.Int32,
    "torch.float32",
    torch.device("cpu"),
    torch.device("cuda", 0),
    torch.device("cuda", 1),
    torch.strided,
    torch.channels_last,
    torch.Size([2, 3]),
    torch.Size([3, 2]),
    (2, 3),
    cutlass.Int32(1),
    cutlass.Int32(2),
    cutlass.Int64(1),
    kernel(1),
    kernel(2),
]


def test_dtypes_devices_and_kernels_are_told_apart() -> None:
    seen: dict[bytes, Any] = {}
    for value in DIFFERENT:
        assert seen.setdefault(encode(value), value) is value


def test_kernels_of_one_factory_with_one_value_have_the_same_bytes() -> None:
    assert encode(kernel(3)) == encode(kernel(3))


class TensorOfOurs(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "value",
    [torch.zeros(2), torch.nn.Parameter(torch.zeros(2)), torch.zeros(2).as_subclass(TensorOfOurs)],
    ids=["tensor", "parameter", "subclass"],
)
def test_a_tensor_is_refused_and_told_what_to_pass_instead(value: Any) -> None:
    for wrapped in (value, [value], {"x": (value,)}):
        with pytest.raises(UnkeyableError, match=r"a tensor .* is data.*pass its dtype or shape"):
            encode(wrapped)


ASKED = """
import torch, cutlass
from pytest_quack.cache.key import encode
from pytest_quack.cache.reach import Reach
for value in ({torch.float16, torch.bfloat16, "x"}, {cutlass.Float32: 1}, torch.Size([2]), cutlass.Int32(1)):
    print(encode(value).hex())
"""


def test_bytes_of_dtypes_are_the_same_in_processes_with_other_hash_seeds() -> None:
    said = []
    for seed in ("1", "4711"):
        environ = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", ASKED], env=environ, capture_output=True, text=True, timeout=120, check=True
        )
        said.append(done.stdout)
    assert said[0] == said[1]
    assert len(said[0].split()) == 4


OWN = 2


@cute.jit  # type: ignore[misc, untyped-decorator, unused-ignore] - the DSL's decorators have no types
def looped(x: cute.Tensor, y: cute.Tensor) -> None:
    for i in range(cute.size(x)):
        value = x[i]
        if value > cutlass.Float32(0.0):
            value = value * OWN
        y[i] = value


def compile_looped() -> Any:
    x, y = (
        cute.runtime.make_fake_compact_tensor(
            cutlass.Float32, (8,), stride_order=(0,), memspace=cutlass.AddressSpace.generic
        )
        for _ in range(2)
    )
    return cute.compile(looped, x, y)


def test_compiling_a_function_changes_neither_its_bytes_nor_what_it_reads() -> None:
    """The DSL rewrites a function in place; what counts is what its author wrote."""
    local = kernel(5)
    before = encode(local), Reach([compile_looped]).encoded(), Reach([compile_looped]).modules
    compile_looped()
    cute.compile(local, cutlass.Int32(1))
    assert (encode(local), Reach([compile_looped]).encoded(), Reach([compile_looped]).modules) == before
    assert "OWN" in "".join(before[1])
