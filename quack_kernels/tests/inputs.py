"""Inputs that the tests of several ops share."""

from collections.abc import Callable
from typing import Final

import torch


def random_rows(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    """Return normally distributed numbers that depend on the arguments only."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(dtype)


def _with_padding(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, torch.full_like(x, float("nan"))], -1)[..., : x.shape[-1]]


def _every_second_row(x: torch.Tensor) -> torch.Tensor:
    return x.repeat_interleave(2, 0)[::2]


def _one_row_repeated(x: torch.Tensor) -> torch.Tensor:
    return x[:1].expand(x.shape)


def _columns_apart(x: torch.Tensor) -> torch.Tensor:
    return x.t().contiguous().t()


def _unaligned(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


def _uneven_leading_dimensions(x: torch.Tensor) -> torch.Tensor:
    return x.expand(2, *x.shape).transpose(0, 1)


# Each takes contiguous (M, N) and returns a view of something that is laid out otherwise.
LAYOUTS: Final[dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "rows_with_padding": _with_padding,
    "every_second_row": _every_second_row,
    "one_row_repeated": _one_row_repeated,
    "columns_apart": _columns_apart,
    "unaligned_start": _unaligned,
    "uneven_leading_dimensions": _uneven_leading_dimensions,
}

SHAPES: Final = ((17,), (0, 17), (1, 17), (100, 17), (2, 3, 17), (2, 0, 17), (1, 1, 1, 17))
