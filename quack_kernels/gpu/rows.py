"""Moving rows between global memory and registers."""

from typing import Any

from cutlass import Constexpr, Int32, Int64, const_expr, cute, range_constexpr

from .config import VECTOR_BYTES, RowLaunch


def launch_of(config: RowLaunch, rows: Any) -> dict[str, Any]:
    """Return what `launch` is told for a kernel over `rows` rows, which may be any 64-bit number."""
    return {
        "grid": [Int32(cute.ceil_div(rows, config.rows_per_cta)), config.cluster, 1],
        "block": [config.threads, 1, 1],
        "cluster": [1, config.cluster, 1] if config.cluster > 1 else None,
    }


@cute.jit
def position(rows: Any, config: Constexpr) -> tuple[Int64, Any, Int32, Int32]:
    """Return the row that this thread works on, whether it is to write it, and its place in that row.

    Threads beyond the last of `rows` rows work on the last one, and write nothing. The place is the thread's number
    among those that share the row in this CTA, and the CTA's first column, counted from the row's first vector (see
    `shift_of`).
    """
    thread, cta = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
    row = Int64(cta) * config.rows_per_cta + thread // config.threads_per_row
    column = Int32(0)
    if const_expr(config.cluster > 1):
        column = cute.arch.block_idx()[1] * config.columns_per_cta
    thread = thread % config.threads_per_row
    is_row = row < rows
    if not is_row:
        row = Int64(rows) - 1
    return row, is_row, thread, column


@cute.jit
def shift_of(gX: cute.Tensor, config: Constexpr) -> Int32:
    """Return by how many columns the first vector begins before the row `gX`, so that vectors are aligned."""
    shift = Int32(0)
    if const_expr(config.largest_shift > 0):
        itemsize = gX.element_type.width // 8
        shift = Int32(gX.iterator.toint() % VECTOR_BYTES) // itemsize
    return shift


@cute.jit
def load_columns(
    gX: cute.Tensor, thread: Int32, column: Int32, shift: Int32, config: Constexpr, fill: Constexpr
) -> cute.Tensor:
    """Return this thread's part of the row `gX` as a fragment (vector, vectors_per_thread).

    Columns that the row does not have are `fill`. Vectors are loaded whole where `gX` is aligned at `shift`, and
    element by element elsewhere and at both ends of the row.
    """
    rX = cute.make_rmem_tensor(cute.make_layout((config.vector, config.vectors_per_thread)), gX.element_type)
    if const_expr(not config.is_even):
        rX.fill(fill)
    first = column - shift
    if _is_aligned(gX, shift):
        tXgX = _vectors(gX, first, config)
        for j in range_constexpr(config.vectors_per_thread):
            start = first + (thread + j * config.threads_per_row) * config.vector
            if _is_inside(start, config):
                cute.autovec_copy(tXgX[None, thread, j], rX[None, j])
            elif const_expr(config.largest_shift > 0):
                _load_elements(gX, rX, start, j, config)
    else:
        for j in range_constexpr(config.vectors_per_thread):
            _load_elements(gX, rX, first + (thread + j * config.threads_per_row) * config.vector, j, config)
    return rX


@cute.jit
def store_columns(
    rY: cute.Tensor, gY: cute.Tensor, thread: Int32, column: Int32, shift: Int32, config: Constexpr
) -> None:
    """Write a fragment as `load_columns` returns it to the row `gY`."""
    first = column - shift
    if _is_aligned(gY, shift):
        tYgY = _vectors(gY, first, config)
        for j in range_constexpr(config.vectors_per_thread):
            start = first + (thread + j * config.threads_per_row) * config.vector
            if _is_inside(start, config):
                cute.autovec_copy(rY[None, j], tYgY[None, thread, j])
            elif const_expr(config.largest_shift > 0):
                _store_elements(rY, gY, start, j, config)
    else:
        for j in range_constexpr(config.vectors_per_thread):
            _store_elements(rY, gY, first + (thread + j * config.threads_per_row) * config.vector, j, config)


@cute.jit
def _is_aligned(gX: cute.Tensor, shift: Int32) -> Any:
    """Whether the element `shift` columns before the row `gX` is at a vector's boundary."""
    return (gX.iterator.toint() - shift * (gX.element_type.width // 8)) % VECTOR_BYTES == 0


@cute.jit
def _is_inside(start: Int32, config: Constexpr) -> Any:
    """Whether the row has all columns of the vector from column `start` on."""
    is_inside = start + config.vector <= config.n
    if const_expr(config.largest_shift > 0):
        is_inside = is_inside and start >= 0
    return True if const_expr(config.is_even) else is_inside


@cute.jit
def _vectors(gX: cute.Tensor, first: Int32, config: Constexpr) -> cute.Tensor:
    """Return the row from column `first` on, aligned there, as (vector, thread, vector of the thread)."""
    stride = (1, config.vector, config.vector * config.threads_per_row)
    shape = (config.vector, config.threads_per_row, config.vectors_per_thread)
    return cute.make_tensor((gX.iterator + first).align(VECTOR_BYTES), cute.make_layout(shape, stride=stride))


@cute.jit
def _load_elements(gX: cute.Tensor, rX: cute.Tensor, start: Int32, j: Constexpr, config: Constexpr) -> None:
    for v in range_constexpr(config.vector):
        if start + v >= 0 and start + v < config.n:
            rX[v, j] = gX[start + v]


@cute.jit
def _store_elements(rY: cute.Tensor, gY: cute.Tensor, start: Int32, j: Constexpr, config: Constexpr) -> None:
    for v in range_constexpr(config.vector):
        if start + v >= 0 and start + v < config.n:
            gY[start + v] = rY[v, j]
