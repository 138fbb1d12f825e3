"""Launch configuration of RMSNorm, a pure function of the shape."""

from typing import Final

from ...gpu.config import RowLaunch, row_launch
from ...host.config import RowConfig, row_config

# Additions of one chain wait about 4 cycles for each other, and two can start per cycle: 8 chains keep both busy.
_HOST_UNROLL: Final = 8


def host_config(n: int) -> RowConfig:
    """Return how the host kernel walks rows of `n` columns."""
    return row_config(n, unroll=_HOST_UNROLL)


def gpu_config(n: int, itemsize: int) -> RowLaunch:
    """Return the launch of the GPU kernel for rows of `n` columns of `itemsize` bytes."""
    return row_launch(n, itemsize, vectors=8, cta_bytes=65_536)
