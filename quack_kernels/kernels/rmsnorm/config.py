"""Launch configuration of RMSNorm, a pure function of the shape."""

from typing import Final

from ...host.config import RowConfig, row_config

# Additions of one chain wait about 4 cycles for each other, and two can start per cycle: 8 chains keep both busy.
_HOST_UNROLL: Final = 8


def host_config(n: int) -> RowConfig:
    """Return how the host kernel walks rows of `n` columns."""
    return row_config(n, unroll=_HOST_UNROLL)
