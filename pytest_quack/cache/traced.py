"""Traced functions: any code's compile, looked up by content key, made by the pool, found in the store.

The asking process traces and asks (`TraceCache.resolve`); a compile process lowers what it is sent (`run_traced_job`).
Inside a compile function of `jit_cache`, in a compile process, the trace gives the content key as well, and an artifact
that is there already ends the compile (`TraceCache` with `is_asking=False`).

Before anything that was made elsewhere is used, the backend checks its interception in a compile process, once for each
version of the compiler and cache directory (`run_check_job`). It runs beside the first compiles, and nobody waits for
it before the first artifact is there.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Final

import pytest_quack
from pytest_quack.backends import CompileHere, Exported, find_backend
from pytest_quack.cache import key as canonical
from pytest_quack.cache.artifact import environment_parts, make_artifact
from pytest_quack.cache.store import Artifact, LockTimeoutError
from pytest_quack.compile.active import get_active_pool
from pytest_quack.compile.asking import AskingSide
from pytest_quack.compile.job import CheckJob, CompileFailure, CompileResult, FailureKind, KeyState, TracedJob
from pytest_quack.errors import CompileError, ExportError, InterceptionError, TargetArchError
from pytest_quack.runtime import Runtime, get_runtime


class TraceCache:
    """What to do with a traced function in this process.

    Args:
        backend_name: the backend whose traces these are.
        is_asking: False in a compile process, where nothing is asked of a pool, counted or stored.
    """

    def __init__(self, backend_name: str, *, is_asking: bool = True) -> None:
        self.backend_name: Final = backend_name
        self._is_asking = is_asking
        self._is_checked = not is_asking

    def resolve(self, content_key: str, description: str, dump: Callable[[], bytes]) -> Artifact | CompileHere:
        """The artifact for a content key, or that this process is to compile it.

        `dump` gives the trace as bytes, for a compile process. Raises CompilePending where the pool compiles it,
        CompileError where that killed or hung its process, and InterceptionError where the self-check has failed.
        """
        runtime, pool = get_runtime(), get_active_pool()
        if pool is not None:
            self._begin_check(pool, runtime)
        while True:
            artifact, has_raised = self._find(content_key, runtime)
            if artifact is not None:
                self._require_check(pool)
                if self._is_asking:
                    runtime.hits.add(content_key)
                return artifact
            if pool is None:
                return CompileHere(is_for_export=not self._is_asking)
            state, failure = pool.poll(content_key)
            if state is KeyState.NEW and has_raised:
                return CompileHere("it raised when it was last compiled, but not now")
            if state is KeyState.NEW:
                pool.submit(TracedJob(content_key, self.backend_name, dump(), pool.asker(runtime), description))
            elif state is KeyState.DONE:
                result = pool.result(content_key)
                if result is not None and result.artifact is not None:
                    self._require_check(pool)
                    return result.artifact  # type: ignore[no-any-return]
                return CompileHere("the pool's artifact is no longer in the cache")
            elif state is KeyState.FAILED:
                assert failure is not None
                if failure.kind in {FailureKind.CRASHED, FailureKind.TIMED_OUT}:
                    raise CompileError(f"{description}: {failure.message}")
                return CompileHere(failure.message)
            else:
                pool.await_or_raise(content_key, description)

    def made_here(
        self, content_key: str, description: str, why: CompileHere, seconds: float, export: Callable[[], Exported]
    ) -> None:
        """Count what this process has compiled itself, and store it for the next."""
        if not self._is_asking:
            return
        runtime, backend = get_runtime(), find_backend(self.backend_name)
        runtime.compiled_here[content_key] = why.reason
        if why.reason:
            runtime.notices.add(f"{description} was compiled in the test process: {why.reason.splitlines()[0]}")
        if runtime.store is None or not runtime.store.is_writable:
            return
        try:
            exported = export()
        except (ExportError, TargetArchError) as error:
            runtime.notices.add(f"{description} is compiled in each run: {error}")
            return
        runtime.store.put(make_artifact(backend, exported, description=description, compile_s=seconds))

    def discard(self, content_key: str, error: Exception) -> None:
        """An artifact passed its checks but could not be loaded: it was no hit."""
        runtime = get_runtime()
        runtime.hits.discard(content_key)
        if runtime.store is not None:
            runtime.store.discard(content_key, RuntimeError(f"it passed its checks, but {error}"))

    def _find(self, content_key: str, runtime: Runtime) -> tuple[Artifact | None, bool]:
        """The artifact from the store, if it is there, and whether the compile raised when it was last tried."""
        store = runtime.store
        if store is None:
            return None, False
        artifact = store.find(content_key)
        if artifact is not None and artifact.sidecar.backend == find_backend(self.backend_name).name:
            return artifact, False
        pointer = store.find_pointer(content_key)
        return None, pointer is not None and not pointer.content_key

    def _begin_check(self, pool: AskingSide, runtime: Runtime) -> None:
        """Have the self-check made, unless this or an earlier run has seen it pass."""
        if self._is_checked:
            return
        key = self._check_key()
        if pool.poll(key)[0] is KeyState.NEW and not self._has_passed_before(key, runtime):
            pool.submit(CheckJob(key, self.backend_name, pool.asker(runtime), "self-check of the interception"))
            pool.add_waiter(key)

    def _require_check(self, pool: AskingSide | None) -> None:
        """Wait for the self-check's end. Raises InterceptionError where it has failed."""
        if self._is_checked or pool is None:
            return
        key = self._check_key()
        if pool.poll(key)[0] is KeyState.PENDING:
            pool.wait(key)
        failure = pool.poll(key)[1]
        if failure is not None:
            raise InterceptionError(f"a check of the interception failed: {failure.message}")
        self._is_checked = True

    def _has_passed_before(self, key: str, runtime: Runtime) -> bool:
        pointer = runtime.store.find_pointer(key) if runtime.store is not None else None
        self._is_checked = pointer is not None and bool(pointer.content_key)
        return self._is_checked

    def _check_key(self) -> str:
        parts = environment_parts(find_backend(self.backend_name))
        return canonical.digest({"kind": b"self-check", "plugin": pytest_quack.__version__.encode(), **parts})


def run_check_job(job: CheckJob, on_start: Callable[[], None]) -> CompileResult:
    """What a compile process does for a self-check: make it, and store that it has passed."""
    backend, store = find_backend(job.backend), get_runtime().store
    on_start()
    began = time.perf_counter()
    exported = backend.check_interception()
    seconds = time.perf_counter() - began
    if store is not None:
        store.publish(make_artifact(backend, exported, description=job.description, compile_s=seconds), job.key)
    return CompileResult(job.key, None, seconds)


def run_traced_job(job: TracedJob, on_start: Callable[[], None]) -> CompileResult:
    """What a compile process does with a trace: lower, export, publish. `on_start`: as in `JitFunction.run_job`."""
    backend, store = find_backend(job.backend), get_runtime().store
    with contextlib.ExitStack() as held:
        if store is not None:
            try:
                held.enter_context(store.lock(job.key, timeout_s=get_runtime().settings.timeout_s))
            except LockTimeoutError as error:
                return CompileResult(job.key, CompileFailure(FailureKind.REFUSED, str(error)))
            if store.find(job.key) is not None:
                return CompileResult(job.key, None)
        on_start()
        began = time.perf_counter()
        try:
            exported = backend.lower(job.payload, job.key)
        except Exception:  # what the compiler raises is remembered, and raised on
            if store is not None:
                store.note_failure(job.key)
            raise
        seconds = time.perf_counter() - began
        artifact = make_artifact(backend, exported, description=job.description, compile_s=seconds)
        is_stored = store is not None and store.put(artifact, is_locked=True)
    return CompileResult(job.key, None, artifact.sidecar.compile_s, None if is_stored else artifact)
