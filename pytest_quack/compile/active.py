"""Which pool is active, if any: the session's, or one for the length of a block."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any

from pytest_quack.compile.asking import AskingSide
from pytest_quack.compile.pool import CompilePool

_active: AskingSide | None = None
_lock = threading.Lock()
_suppressed: Any = threading.local()


def get_active_pool() -> AskingSide | None:
    """The pool that a miss is submitted to; None where there is none, inside `suppress_pool()`, and in a child process.

    A child made by `fork` has its parent's pool object but not its processes, so it compiles for itself.
    """
    pool = _active
    is_suppressed = getattr(_suppressed, "depth", None)
    if pool is None or is_suppressed or pool.owner_pid != os.getpid():
        return None
    return pool


def activate(pool: AskingSide) -> AskingSide | None:
    """Make `pool` the active one; returns the one that was active before, for `deactivate`."""
    global _active
    with _lock:
        before, _active = _active, pool
    return before


def deactivate(before: AskingSide | None = None) -> None:
    """Make `before` the active pool again."""
    global _active
    with _lock:
        _active = before


@contextlib.contextmanager
def pool_scope(jobs: int | None = None) -> Iterator[AskingSide]:
    """Have an active pool for the length of the block: the one there is, or a new one that ends with the block.

    Inside, a miss raises `CompilePending` unless the pool was given another policy; catch it for each kernel and come
    back to that kernel when `pool.wait_any()` says so.

    Args:
        jobs: compile processes of a new pool; by default QUACK_COMPILE_JOBS, else as many as the machine allows.

    Raises ValueError where `jobs` is below 1.
    """
    active = get_active_pool()
    if active is not None:
        yield active
        return
    pool = CompilePool(jobs)
    before = activate(pool)
    try:
        yield pool
    finally:
        deactivate(before)
        pool.shutdown()


@contextlib.contextmanager
def suppress_pool() -> Iterator[None]:
    """Within the block, in this thread, a miss is compiled in place as if there were no pool."""
    _suppressed.depth = (getattr(_suppressed, "depth", None) or 0) + 1
    try:
        yield
    finally:
        _suppressed.depth -= 1
