"""High-precision references, and the distance between a result and its reference."""

from typing import Final

import torch
from torch._subclasses.fake_tensor import FakeTensor

_BITS: Final = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
_FAR: Final = 2**32  # farther apart than any two numbers of the dtypes above


def rmsnorm_reference(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Return RMSNorm evaluated in float64 and rounded to the dtype of x."""
    wide = x.double()
    result = wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (result if weight is None else result * weight.double()).to(x.dtype)


def softmax_reference(x: torch.Tensor) -> torch.Tensor:
    """Return softmax evaluated in float64 and rounded to the dtype of x."""
    return torch.softmax(x.double(), -1).to(x.dtype)


def assert_within_one_ulp(result: torch.Tensor, reference: torch.Tensor) -> None:
    """Assert that a result is as good as its dtype allows; of one without data, that it has the right form."""
    assert (result.shape, result.dtype, result.device) == (reference.shape, reference.dtype, reference.device)
    if not isinstance(result, FakeTensor):
        assert largest_ulp_distance(result, reference) <= 1


def largest_ulp_distance(result: torch.Tensor, reference: torch.Tensor) -> int:
    """Return how many representable numbers lie between the two where they differ most; 0 for two NaNs.

    A NaN beside a number counts as farther than any number, and so does a different dtype or shape.
    """
    if result.dtype != reference.dtype or result.shape != reference.shape:
        return _FAR
    if result.numel() == 0:
        return 0
    distance = (_ordinal(result) - _ordinal(reference)).abs()
    distance = torch.where(result.isnan() ^ reference.isnan(), _FAR, distance)
    return int(torch.where(result.isnan() & reference.isnan(), 0, distance).max())


def _ordinal(x: torch.Tensor) -> torch.Tensor:
    """Number floats in their order, both zeros 0: the bits themselves, negative floats counted downwards."""
    bits = x.contiguous().view(_BITS[x.dtype]).long()
    return torch.where(bits >= 0, bits, -(bits - torch.iinfo(_BITS[x.dtype]).min))
