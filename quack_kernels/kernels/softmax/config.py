"""Launch configuration of softmax, a pure function of the shape."""

from typing import Final

from ...gpu.config import RowLaunch, row_launch
from ...host.config import RowConfig, row_config

# The pass that sums exponentials waits for exp and not for additions; more partial results only make code.
_HOST_UNROLL: Final = 4


def host_config(n: int) -> RowConfig:
    """Return how the host kernel walks rows of `n` columns."""
    return row_config(n, unroll=_HOST_UNROLL)


def gpu_config(n: int, itemsize: int) -> RowLaunch:
    """Return the launch of the GPU kernel for rows of `n` columns of `itemsize` bytes."""
    return row_launch(n, itemsize, vectors=4, cta_bytes=65_536)
