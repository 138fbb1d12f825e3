"""What the run says about itself: one line in the header, a few at the end."""

from __future__ import annotations

from dataclasses import dataclass, field

from pytest_quack.compile.job import FailureKind, PoolStats
from pytest_quack.settings import Settings

_SLOWEST = 3
# The test compiles these again in its own process: it sees the error, or a notice says why the pool could not do it.
_TOLD_BY_THE_TEST = {FailureKind.RAISED, FailureKind.REFUSED, FailureKind.POOL}


@dataclass(frozen=True, slots=True)
class RunCounts:
    """Everything that the summary is made of.

    Attributes:
        hits: keys loaded from the cache.
        compiled_here: keys compiled in the test process.
        uncached: calls that could not be cached.
        corrupt: damaged cache entries that were set aside.
        deferrals: how often each test was put off, by node id.
        waits: how often a call waited in place, by reason.
        notices: what to tell the user once -> how often it happened.
        pool: the pool's counts; None where there was no pool.
    """

    hits: int = 0
    compiled_here: int = 0
    uncached: int = 0
    corrupt: int = 0
    deferrals: dict[str, int] = field(default_factory=dict)
    waits: dict[str, int] = field(default_factory=dict)
    notices: dict[str, int] = field(default_factory=dict)
    pool: PoolStats | None = None


def header(settings: Settings, jobs: int, why_wait: str | None, cache: str) -> str:
    """The line under pytest's own header."""
    how = f"tests wait in place ({why_wait})" if why_wait else "tests step aside"
    arch = f", for {settings.compile_arch}" if settings.compile_arch else ""
    return f"async-compile: {jobs} compile processes{arch}, {how}; cache: {cache}"


def lines(counts: RunCounts) -> list[str]:
    """The summary, most important first; empty where there is nothing to say."""
    pool = counts.pool
    text = []
    parts = [f"{counts.hits} hit"]
    if pool is not None:
        parts += [f"{pool.submitted} submitted", f"{pool.done} done", f"{pool.failed} failed"]
        if pool.pending:
            parts.append(f"{pool.pending} not finished")
    if counts.compiled_here:
        parts.append(f"{counts.compiled_here} compiled in the test process")
    text.append("kernels: " + ", ".join(parts))
    if counts.deferrals:
        total, tests = sum(counts.deferrals.values()), len(counts.deferrals)
        text.append(f"deferred: {_count(tests, 'test')}, {_count(total, 'time')} in all")
    if counts.waits:
        reasons = "; ".join(f"{_count(n, 'time')} because {why}" for why, n in sorted(counts.waits.items()))
        text.append(f"waited in place: {reasons}")
    if pool is not None and pool.slowest:
        slowest = ", ".join(f"{seconds:.2f} s {name}" for seconds, name in pool.slowest[:_SLOWEST])
        text.append(f"slowest kernels: {slowest}")
    if pool is not None and pool.workers_crashed:
        text.append(f"compile processes that died: {pool.workers_crashed}")
    if counts.corrupt:
        text.append(f"damaged cache entries set aside and compiled again: {counts.corrupt}")
    if counts.uncached:
        text.append(f"calls that could not be cached: {counts.uncached}")
    if pool is not None:
        for key, (name, failure) in pool.failures.items():
            if failure.kind in _TOLD_BY_THE_TEST:
                continue
            first = (failure.message.splitlines() or [""])[0]
            text.append(f"not compiled in the pool ({failure.kind.value}): {name}, key {key[:12]}: {first}")
    for notice, times in counts.notices.items():
        text.append(notice if times == 1 else f"{notice} ({times} times)")
    return text


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
