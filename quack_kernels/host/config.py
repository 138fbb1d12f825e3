"""How a host kernel walks one row."""

from dataclasses import dataclass

from ..errors import ArgumentError

# Columns are counted in 32 bits inside a row; rows and row strides in 64.
_MAX_COLUMNS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class RowConfig:
    """Columns of a row, and the partial results that a reduction over it keeps.

    A row is reduced `unroll` columns per loop iteration into as many partial results. That gives the processor
    independent chains of additions, shortens the rounding chain, and keeps the code size independent of `n`.
    """

    n: int
    unroll: int

    @property
    def whole_blocks(self) -> int:
        """Loop iterations that use all partial results."""
        return self.n // self.unroll

    @property
    def tail_start(self) -> int:
        """First column that the loop leaves over."""
        return self.whole_blocks * self.unroll


def row_config(n: int, *, unroll: int) -> RowConfig:
    """Return the configuration for rows of `n` columns, with no more partial results than columns.

    Raises: ArgumentError for an `n` that has no kernel.
    """
    if not 1 <= n <= _MAX_COLUMNS:
        raise ArgumentError("n", f"is {n}", f"a kernel is compiled for 1 to {_MAX_COLUMNS} columns")
    return RowConfig(n=n, unroll=min(n, unroll))
