"""Which queued key is compiled next: a pure function of demand."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class QueuedKey:
    """A key that waits for a compile process.

    Attributes:
        waiters: how many tests or calls cannot go on without it.
        order: when it was submitted, counted from 0.
    """

    key: str
    waiters: int
    order: int


def next_key(queued: Iterable[QueuedKey]) -> str | None:
    """The key to compile next: what most are waiting for, then what was asked for first. None where none is queued."""
    best = min(queued, key=lambda entry: (-entry.waiters, entry.order), default=None)
    return best.key if best is not None else None
