"""What the run says about itself: one line in the header, a few at the end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pytest_quack.compile.job import FailureKind, PoolStats
from pytest_quack.settings import Settings

_SLOWEST = 3
_MOST_OOM_RETRIES = 10
# The test compiles these again in its own process: it sees the error, or a notice says why the pool could not do it.
_TOLD_BY_THE_TEST = {FailureKind.RAISED, FailureKind.REFUSED, FailureKind.POOL}


@dataclass(slots=True)
class RunCounts:
    """Everything that the summary is made of, of one test process or of several.

    Attributes:
        hits: keys loaded from the cache.
        compiled_here: keys compiled in a test process.
        uncached: calls that could not be cached.
        corrupt: damaged cache entries that were set aside.
        deferrals: how often each test was put off, by node id.
        waits: how often a call waited in place, by reason.
        oom_retries: what is to be said of each attempt that ran out of device memory and was made again.
        notices: what to tell the user once -> how often it happened.
        pool: the pool's counts; None where there was no pool.
    """

    hits: set[str] = field(default_factory=set)
    compiled_here: set[str] = field(default_factory=set)
    uncached: int = 0
    corrupt: int = 0
    deferrals: dict[str, int] = field(default_factory=dict)
    waits: dict[str, int] = field(default_factory=dict)
    oom_retries: list[str] = field(default_factory=list)
    notices: dict[str, int] = field(default_factory=dict)
    pool: PoolStats | None = None

    def to_plain(self) -> dict[str, Any]:
        """Return all but the pool's counts as values that any channel can carry."""
        return {
            "hits": sorted(self.hits),
            "compiled_here": sorted(self.compiled_here),
            "uncached": self.uncached,
            "corrupt": self.corrupt,
            "deferrals": dict(self.deferrals),
            "waits": dict(self.waits),
            "oom_retries": list(self.oom_retries),
            "notices": dict(self.notices),
        }

    def add_plain(self, plain: dict[str, Any]) -> None:
        """Add what another test process has counted, as `to_plain` gives it."""
        self.hits.update(plain.get("hits", ()))
        self.compiled_here.update(plain.get("compiled_here", ()))
        self.uncached += plain.get("uncached", 0)
        self.corrupt += plain.get("corrupt", 0)
        self.oom_retries += plain.get("oom_retries", ())
        for name in ("deferrals", "waits", "notices"):
            ours: dict[str, int] = getattr(self, name)
            for text, number in plain.get(name, {}).items():
                ours[text] = ours.get(text, 0) + number


def header(settings: Settings, jobs: int, why_wait: str | None, cache: str) -> str:
    """The line under pytest's own header."""
    how = f"tests wait in place ({why_wait})" if why_wait else "tests step aside"
    arch = f", for {settings.compile_arch}" if settings.compile_arch else ""
    return f"async-compile: {jobs} compile processes{arch}, {how}; cache: {cache}"


def lines(counts: RunCounts) -> list[str]:
    """The summary, most important first; empty where there is nothing to say."""
    pool = counts.pool
    text = []
    parts = [f"{len(counts.hits)} hit"]
    if pool is not None:
        parts += [f"{pool.submitted} submitted", f"{pool.done} done", f"{pool.failed} failed"]
        if pool.pending:
            parts.append(f"{pool.pending} not finished")
    if counts.compiled_here:
        parts.append(f"{len(counts.compiled_here)} compiled in the test process")
    text.append("kernels: " + ", ".join(parts))
    if counts.deferrals:
        total, tests = sum(counts.deferrals.values()), len(counts.deferrals)
        text.append(f"deferred: {_count(tests, 'test')}, {_count(total, 'time')} in all")
    if counts.oom_retries:
        more = len(counts.oom_retries) - _MOST_OOM_RETRIES
        text.append(f"out of device memory: {_count(len(counts.oom_retries), 'attempt')}, each made again")
        text += [f"  {line}" for line in counts.oom_retries[:_MOST_OOM_RETRIES]]
        text += [f"  and {more} more"] if more > 0 else []
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
