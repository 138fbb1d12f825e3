"""How a GPU kernel cuts its rows among threads; pure functions of the shape."""

from dataclasses import dataclass
from typing import Final

from ..errors import ArgumentError

MAX_COLUMNS: Final = 262_144
VECTOR_BYTES: Final = 16
WARP: Final = 32
# The most CTAs that every GPU with clusters accepts in one.
MAX_CLUSTER: Final = 8
MAX_THREADS: Final = 1024


@dataclass(frozen=True, slots=True)
class RowLaunch:
    """The launch of a kernel that keeps each row in the registers of its threads.

    Attributes:
        n: columns of a row.
        vector: elements in one vector, the unit of a load or store.
        threads_per_row: threads of one CTA that share a row, a power of two.
        rows_per_cta: rows that one CTA takes at once; 1 where a row takes several CTAs.
        vectors_per_thread: vectors of a row that each thread keeps.
        cluster: CTAs that share a row, a power of two.
    """

    n: int
    vector: int
    threads_per_row: int
    rows_per_cta: int
    vectors_per_thread: int
    cluster: int = 1

    def __post_init__(self) -> None:
        """Raise ValueError for numbers that no launch can have, or that leave columns out."""
        threads = self.threads_per_row * self.rows_per_cta
        if not (_is_power_of_two(self.threads_per_row) and threads <= MAX_THREADS and threads % WARP == 0):
            raise ValueError(f"{self} has {threads} threads, which must be whole warps, at most {MAX_THREADS}")
        if not (_is_power_of_two(self.cluster) and self.cluster <= MAX_CLUSTER):
            raise ValueError(f"{self} has a cluster of {self.cluster}, which must be 1, 2, 4 or {MAX_CLUSTER}")
        if self.cluster > 1 and self.rows_per_cta > 1:
            raise ValueError(f"{self} has several rows in a CTA of a cluster")
        if self.columns_per_cta * self.cluster < self.n + self.largest_shift:
            raise ValueError(f"{self} holds {self.columns_per_cta * self.cluster} columns of a row, too few")

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return self.threads_per_row * self.rows_per_cta

    @property
    def warps_per_row(self) -> int:
        """Warps of one CTA that share a row; 1 where a warp has several rows."""
        return max(1, self.threads_per_row // WARP)

    @property
    def partials(self) -> int:
        """Partial results of a row, one from each warp of each CTA."""
        return self.warps_per_row * self.cluster

    @property
    def columns_per_cta(self) -> int:
        """Columns that the registers of one CTA hold of a row."""
        return self.threads_per_row * self.vectors_per_thread * self.vector

    @property
    def largest_shift(self) -> int:
        """Columns by which the first vector may begin before the row.

        Rows whose length is no whole number of vectors begin anywhere, so their vectors are counted from the last
        16-byte boundary at or before the row. Other rows begin at a boundary as a rule; where not, they are moved
        element by element.
        """
        return 0 if self.n % self.vector == 0 else self.vector - 1

    @property
    def is_even(self) -> bool:
        """Whether the threads' vectors are the row and nothing else."""
        return self.largest_shift == 0 and self.columns_per_cta * self.cluster == self.n


def row_launch(n: int, itemsize: int, *, vectors: int, cta_bytes: int, threads: int = 128) -> RowLaunch:
    """Return the launch for rows of `n` columns of `itemsize` bytes.

    Args:
        vectors: the most vectors that a thread should keep; one more where vectors may begin before the row, and more
            where a row is too long for a cluster.
        cta_bytes: the most bytes of a row that one CTA should keep, before a cluster shares it.
        threads: the fewest threads of a CTA.

    Raises: ArgumentError for an `n` that has no kernel.
    """
    if not 1 <= n <= MAX_COLUMNS:
        raise ArgumentError("n", f"is {n}", f"GPU kernels are compiled for 1 to {MAX_COLUMNS} columns")
    vector = VECTOR_BYTES // itemsize
    shift = 0 if n % vector == 0 else vector - 1
    cluster = min(MAX_CLUSTER, power_of_two_from(_divide_up(n * itemsize, cta_bytes)))
    of_cta = _divide_up(_divide_up(n + shift, vector), cluster)
    # The vector that a shift may add is one more for each thread, rather than twice the threads.
    threads_per_row = min(MAX_THREADS, _threads_per_row(_divide_up(_divide_up(n, vector), cluster), vectors))
    return RowLaunch(
        n=n,
        vector=vector,
        threads_per_row=threads_per_row,
        rows_per_cta=1 if cluster > 1 else max(1, threads // threads_per_row),
        vectors_per_thread=_divide_up(of_cta, threads_per_row),
        cluster=cluster,
    )


def _threads_per_row(vectors_of_row: int, vectors: int) -> int:
    """Give whole 128-byte lines to neighbouring threads first, then several vectors to each, then more threads."""
    line, warp = 128 // VECTOR_BYTES, WARP
    if vectors_of_row <= line:
        return power_of_two_from(vectors_of_row)
    if vectors_of_row <= line * vectors:
        return line
    if vectors_of_row <= warp * vectors:
        return warp
    return power_of_two_from(_divide_up(vectors_of_row, vectors))


def power_of_two_from(number: int) -> int:
    """Return the smallest power of two that is not below `number`, 1 at least."""
    return 1 << max(0, number - 1).bit_length()


def _divide_up(a: int, b: int) -> int:
    return -(-a // b)


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0
