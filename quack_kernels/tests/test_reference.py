"""The measure that the other tests rely on."""

import pytest
import torch

from .reference import largest_ulp_distance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_neighbours_are_one_ulp_apart_across_zero_and_binades(dtype: torch.dtype) -> None:
    numbers = torch.tensor([-2.0, -1.0, -0.0, 0.0, 1.0, 2.0]).to(dtype)
    bits = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}[dtype]
    away_from_zero = (numbers.view(bits) + 1).view(dtype)
    assert largest_ulp_distance(numbers, away_from_zero) == 1
    assert largest_ulp_distance(numbers[2:3], numbers[3:4]) == 0


def test_nan_equals_only_nan() -> None:
    nan, one = torch.tensor([float("nan")]), torch.tensor([1.0])
    assert largest_ulp_distance(nan, -nan) == 0
    assert largest_ulp_distance(nan, one) > 2**31
    assert largest_ulp_distance(one, nan) > 2**31


def test_other_dtype_or_shape_is_far() -> None:
    one = torch.ones(1)
    assert largest_ulp_distance(one, one.bfloat16()) > 2**31
    assert largest_ulp_distance(one, torch.ones(2)) > 2**31
