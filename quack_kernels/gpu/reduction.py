"""Reductions over one row in GPU kernels: threads of a warp, warps of a CTA, CTAs of a cluster."""

import operator
from collections.abc import Callable
from functools import reduce
from typing import Any, Final

from cutlass import Constexpr, Int32, const_expr, cute, range_constexpr

from ..merge import merge
from .config import WARP, RowLaunch, power_of_two_from

# Additions wait about 4 cycles for each other, and each scheduler starts one per cycle.
_CHAINS: Final = 4


def warp_sum(value: Any, threads: int) -> Any:
    """Return the sum over each aligned group of `threads` lanes, the same bits in all of them."""
    return cute.arch.warp_reduction(value, operator.add, threads_in_group=threads)


def warp_max(value: Any, threads: int) -> Any:
    """Return the largest float32 over each aligned group of `threads` lanes; NaN only where all are NaN."""
    return cute.arch.warp_reduction(value, cute.arch.fmax, threads_in_group=threads)


def local_fold(x: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Combine the thread's own elements, given as a vector, in a few chains: a tree would keep all of them at once."""
    elements = [x[i] for i in range(cute.size(x.shape))]
    return merge([reduce(combine, elements[chain::_CHAINS]) for chain in range(min(_CHAINS, len(elements)))], combine)


def lanes_of(config: RowLaunch) -> int:
    """Lanes of a warp that share a row."""
    return min(WARP, config.threads_per_row)


class PartialResults:
    """Where the warps of a row leave their partial results for each other, in shared memory.

    Each warp writes to all CTAs of its cluster, so that every warp then reads from its own. One barrier separates the
    two. A CTA may not write to one that has not begun (hence `begin`), and need not wait for others at its end: what
    they read is theirs.
    """

    def __init__(self, config: RowLaunch, dtypes: tuple[Any, ...]) -> None:
        """Take the launch and the dtype of each value that a warp leaves."""
        self.config = config
        self.dtypes = dtypes

    @property
    def is_needed(self) -> bool:
        """Whether a row has more than one warp."""
        return self.config.partials > 1

    def allocate(self) -> list[Any]:
        """Return a buffer (row of the CTA, partial result) for each value; none where one warp has the row."""
        if not self.is_needed:
            return []
        layout = cute.make_ordered_layout((self.config.rows_per_cta, self.config.partials), order=(1, 0))
        return [cute.make_tensor(cute.arch.alloc_smem(dtype, cute.cosize(layout), 8), layout) for dtype in self.dtypes]

    @cute.jit
    def begin(self) -> None:
        """Tell the cluster that this CTA runs; called once, before the loads."""
        if const_expr(self.config.cluster > 1):
            cute.arch.cluster_arrive_relaxed()

    @cute.jit
    def exchange(self, buffers: Constexpr, values: Constexpr) -> None:
        """Write this warp's values, which all its lanes have, and return when those of the others are there."""
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        row, partial = warp // self.config.warps_per_row, warp % self.config.warps_per_row
        if const_expr(self.config.cluster == 1):
            if lane == 0:
                for k in range_constexpr(len(self.dtypes)):
                    buffers[k][row, partial] = values[k]
            cute.arch.sync_threads()
        else:
            partial = partial + cute.arch.block_idx_in_cluster() * self.config.warps_per_row
            cute.arch.cluster_wait()
            if lane < self.config.cluster:
                for k in range_constexpr(len(self.dtypes)):
                    _store_remote(buffers[k], row, partial, lane, values[k])
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    @cute.jit
    def read(self, buffer: cute.Tensor, neutral: Constexpr) -> list[Any]:
        """Return the partial results that this lane is to combine with those of the other `lanes`.

        Each aligned group of `lanes` lanes reads all of them, `neutral` in place of those that do not exist.
        """
        lane, row = cute.arch.lane_idx() % self.lanes, cute.arch.warp_idx() // self.config.warps_per_row
        values = []
        for start in range_constexpr(0, self.config.partials, WARP):
            value = buffer.element_type(neutral)
            if lane + start < self.config.partials:
                value = buffer[row, lane + start]
            values.append(value)
        return values

    @property
    def lanes(self) -> int:
        """Lanes among which `read` has spread the partial results."""
        return min(WARP, power_of_two_from(self.config.partials))


@cute.jit
def row_sum(value: Any, buffers: Constexpr, partials: Constexpr) -> Any:
    """Return the sum of `value` over the threads of the row; `partials` has one value."""
    config = partials.config
    value = warp_sum(value, lanes_of(config))
    if const_expr(partials.is_needed):
        partials.exchange(buffers, (value,))
        value = warp_sum(merge(partials.read(buffers[0], 0.0), operator.add), partials.lanes)
    return value


@cute.jit
def _store_remote(buffer: cute.Tensor, row: Int32, partial: Int32, cta: Int32, value: Any) -> None:
    """Write one element of the same buffer in another CTA of the cluster."""
    pointer = cute.arch.map_dsmem_ptr(buffer.iterator + cute.crd2idx((row, partial), buffer.layout), cta)
    width = const_expr(buffer.element_type.width)
    cute.arch.inline_ptx(f"st.shared::cluster.f{width} [{{$r0}}], {{$r1}};", read_only_args=[pointer.toint(), value])
