"""The order in which kernels combine partial results; a pure function, run while a kernel is traced."""

from collections.abc import Callable, Sequence
from typing import TypeVar

Value = TypeVar("Value")


def merge(values: Sequence[Value], combine: Callable[[Value, Value], Value]) -> Value:
    """Combine neighbours until one value is left, so that rounding errors and latencies grow with the logarithm."""
    rest = list(values)
    while len(rest) > 1:
        pairs = [combine(a, b) for a, b in zip(rest[::2], rest[1::2], strict=False)]
        rest = pairs + rest[2 * len(pairs) :]
    return rest[0]
