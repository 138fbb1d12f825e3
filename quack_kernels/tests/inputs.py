"""Inputs that the tests of several ops share."""

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16

# Where an op runs, and on which dtype. Tests that take `device` run on both.
_PLACES: Final = (("cpu", F32), ("cpu", BF16), ("cuda", F32), ("cuda", BF16), ("cuda", F16))


def _place(*values: Any) -> Any:
    names = (str(value).removeprefix("torch.") for value in values)
    return pytest.param(*values, marks=[pytest.mark.gpu] if values[0] == "cuda" else [], id="-".join(names))


CPU_DTYPES: Final = pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
DEVICES: Final = pytest.mark.parametrize("device", [_place("cpu"), _place("cuda")])
PLACES: Final = pytest.mark.parametrize(("device", "dtype"), [_place(*place) for place in _PLACES])
# The same with each dtype that a weight may have.
WEIGHTED_PLACES: Final = pytest.mark.parametrize(
    ("device", "dtype", "weight_dtype"),
    [_place(*place, weight) for place in _PLACES for weight in dict.fromkeys((None, F32, place[1]))],
)


def on(device: str, x: torch.Tensor) -> torch.Tensor:
    """Return x on `device`; itself where that is a GPU which this machine lacks: it has no data then (conftest.py)."""
    if device == "cpu" or torch.cuda.is_available():
        return x.to(device)
    if not isinstance(x, FakeTensor):
        raise RuntimeError("there is no GPU, and only the body of a test function marked gpu can do without")
    return x


def random_rows(
    *shape: int, device: str = "cpu", dtype: torch.dtype = F32, seed: int = 0, scale: float = 1.0
) -> torch.Tensor:
    """Return normally distributed numbers that depend on the arguments only, and not on the device."""
    generator = torch.Generator().manual_seed(seed)
    return on(device, (torch.randn(*shape, generator=generator) * scale).to(dtype))


def _with_padding(x: torch.Tensor) -> torch.Tensor:
    return x.new_full((*x.shape[:-1], 2 * x.shape[-1]), float("nan"))[..., : x.shape[-1]].copy_(x)


def _every_second_row(x: torch.Tensor) -> torch.Tensor:
    return x.repeat_interleave(2, 0)[::2]


def _one_row_repeated(x: torch.Tensor) -> torch.Tensor:
    return x[:1].expand(x.shape)


def _columns_apart(x: torch.Tensor) -> torch.Tensor:
    return x.t().contiguous().t()


def _unaligned(x: torch.Tensor) -> torch.Tensor:
    return x.new_zeros(1 + x.numel())[1:].view(x.shape).copy_(x)


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
