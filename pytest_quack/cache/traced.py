"""Traced functions: any code's compile, looked up by content key, made by the pool, found in the store.

The asking process traces and asks (`TraceCache.resolve`); a compile process lowers what it is sent (`run_traced_job`).
Inside a compile function of `jit_cache`, in a compile process, the trace gives the content key as well, and an artifact
that is there already ends the compile (`TraceCache` without a pool).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Final

from pytest_quack.backends import find_backend
from pytest_quack.cache.artifact import make_artifact
from pytest_quack.cache.store import Artifact, LockTimeoutError
from pytest_quack.compile.active import get_active_pool
from pytest_quack.compile.job import CompileFailure, CompileResult, FailureKind, KeyState, TracedJob
from pytest_quack.errors import CompileError
from pytest_quack.runtime import Runtime, get_runtime


class TraceCache:
    """What to do with a traced function in this process.

    Args:
        backend_name: the backend whose traces these are.
    """

    def __init__(self, backend_name: str) -> None:
        self.backend_name: Final = backend_name

    def resolve(self, content_key: str, description: str, dump: Callable[[], bytes]) -> Artifact | None:
        """The artifact for a content key; None where this process is to compile it.

        `dump` gives the trace as bytes, for a compile process. Raises CompilePending where the pool compiles it, and
        CompileError where that killed or hung its process.
        """
        runtime, pool = get_runtime(), get_active_pool()
        while True:
            artifact, has_raised = self._find(content_key, runtime)
            if artifact is not None or pool is None or has_raised:
                return artifact
            state, failure = pool.poll(content_key)
            if state is KeyState.NEW:
                pool.submit(TracedJob(content_key, self.backend_name, dump(), pool.asker(runtime), description))
            elif state is KeyState.DONE:
                result = pool.result(content_key)
                if result is not None and result.artifact is not None:
                    return result.artifact  # type: ignore[no-any-return]
                return self._give_up(runtime, content_key, description, "the pool's artifact is no longer in the cache")
            elif state is KeyState.FAILED:
                assert failure is not None
                if failure.kind in {FailureKind.CRASHED, FailureKind.TIMED_OUT}:
                    raise CompileError(f"{description}: {failure.message}")
                return self._give_up(runtime, content_key, description, failure.message)
            else:
                pool.await_or_raise(content_key, description)

    def discard(self, content_key: str, error: Exception) -> None:
        """An artifact passed its checks but could not be loaded."""
        store = get_runtime().store
        if store is not None:
            store.discard(content_key, RuntimeError(f"it passed its checks, but {error}"))

    def _find(self, content_key: str, runtime: Runtime) -> tuple[Artifact | None, bool]:
        """The artifact from the store, if it is there, and whether the compile raised when it was last tried."""
        store = runtime.store
        if store is None:
            return None, False
        artifact = store.find(content_key)
        if artifact is not None and artifact.sidecar.backend == find_backend(self.backend_name).name:
            runtime.hits.add(content_key)
            return artifact, False
        pointer = store.find_pointer(content_key)
        return None, pointer is not None and not pointer.content_key

    @staticmethod
    def _give_up(runtime: Runtime, content_key: str, description: str, reason: str) -> None:
        runtime.compiled_here[content_key] = reason
        runtime.notices.add(f"{description} was compiled in the test process: {reason.splitlines()[0]}")


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
