"""The compile pool: what is known of each key, and the one thread that has keys compiled.

    asking thread                     the pool's thread                  compile processes
    submit(job)  -> table: PENDING -> next_key() -> executor.start() ->  compile, publish
    poll(key)    <- table: DONE    <- executor.poll() <----------------  result
    wait(key)    <- condition

Whoever asks never touches a process; the pool's thread never runs user code. A key is submitted once. What fails, and
why, stays known to the end: nothing is submitted again in one run after it failed for good.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
import weakref
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Final

from pytest_quack.compile.asking import GPU_BLIND, AskingSide
from pytest_quack.compile.executors.local import (
    Broken,
    Crashed,
    Event,
    Finished,
    LocalExecutor,
    Needs,
    PreloadFailed,
    Started,
    TimedOut,
)
from pytest_quack.compile.job import (
    CheckJob,
    CompileFailure,
    CompileResult,
    FailureKind,
    Imports,
    Job,
    KeyState,
    PoolStats,
)
from pytest_quack.compile.limits import default_jobs
from pytest_quack.compile.priority import QueuedKey, next_key
from pytest_quack.runtime import Notices, get_runtime

# How often a key that was lost through no fault of its own is started again, and how often a server in a row.
_MAX_STARTS: Final = 3
_MAX_SERVER_FAILURES: Final = 3
# Signals that somebody else sends (the kernel's out-of-memory killer, an administrator), not the compiler.
_FOREIGN_SIGNALS: Final = {-signal.SIGKILL, -signal.SIGTERM}
_live_pools: weakref.WeakSet[CompilePool] = weakref.WeakSet()


@dataclass(slots=True)
class _Entry:
    job: Job
    order: int
    state: KeyState = KeyState.PENDING
    is_running: bool = False
    waiters: int = 0
    starts: int = 0
    failure: CompileFailure | None = None
    result: CompileResult | None = None


class CompilePool(AskingSide):
    """Compiles keys in processes of their own.

    Nothing is started before the first key is submitted or `prewarm` is called. Safe to use from several threads of
    the process that made it; a child made by `fork` must not use it (`get_active_pool` gives it none).

    Args:
        jobs: how many compile processes at most; None or 0 for what QUACK_COMPILE_JOBS says, else as many as the
            machine allows.
        timeout_s: the longest that one compile may take; None for what the settings say.
        notices: where things to tell the user once go.
        is_shared: whether other processes ask, which say by `tell_imports` what theirs need; this one then says
            nothing of its own.

    Raises ValueError where `jobs` is negative.
    """

    def __init__(
        self,
        jobs: int | None = None,
        *,
        timeout_s: float | None = None,
        notices: Notices | None = None,
        is_shared: bool = False,
    ) -> None:
        if jobs is not None and jobs < 0:
            raise ValueError(f"a pool needs at least 1 compile process, not {jobs}")
        super().__init__(jobs or _jobs_from_environ() or default_jobs(), {**os.environ, **GPU_BLIND})
        self._is_shared = is_shared
        self._told_imports: Imports | None = None
        self._timeout_s = timeout_s or get_runtime().settings.timeout_s
        self._notices = notices or get_runtime().notices
        self._entries: dict[str, _Entry] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._executor: LocalExecutor | None = None
        self._is_closing = False
        self._is_server_wanted = False
        self._broken: str | None = None
        self._crashes = 0
        self._settled = 0
        self._server_failures = 0
        _live_pools.add(self)

    # What is known of a key.

    def poll(self, key: str) -> tuple[KeyState, CompileFailure | None]:
        with self._changed:
            entry = self._entries.get(key)
            return (KeyState.NEW, None) if entry is None else (entry.state, entry.failure)

    def pending(self, keys: Collection[str]) -> set[str]:
        with self._changed:
            found = {key: self._entries[key].state for key in keys if key in self._entries}
        return {key for key, state in found.items() if state is KeyState.PENDING}

    def submit(self, job: Job) -> KeyState:
        with self._changed:
            entry = self._entries.get(job.key)
            if entry is not None:
                return entry.state
            entry = self._entries[job.key] = _Entry(job, order=len(self._entries))
            if self._broken is not None or self._is_closing:
                self._fail(entry, CompileFailure(FailureKind.POOL, self._broken or "the pool has been shut down"))
            else:
                if not self._is_shared:
                    self._pin()
                self._ensure_thread()
        self._wake()
        return entry.state

    def wait_any(
        self, keys: Iterable[str], timeout_s: float | None = None, until: Callable[[], bool] | None = None
    ) -> tuple[str, ...]:
        wanted = list(keys)

        def settled() -> tuple[str, ...]:
            return tuple(key for key in wanted if self.poll(key)[0] is not KeyState.PENDING)

        self._wait(wanted, lambda: not wanted or bool(settled()) or (until is not None and until()), timeout_s)
        return settled()

    def nudge(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def add_waiter(self, key: str) -> None:
        with self._changed:
            if key in self._entries:
                self._entries[key].waiters += 1

    @property
    def settled(self) -> int:
        return self._settled

    def result(self, key: str) -> CompileResult | None:
        with self._changed:
            entry = self._entries.get(key)
            return entry.result if entry is not None else None

    def stats(self) -> PoolStats:
        with self._changed:
            entries = [entry for entry in self._entries.values() if not isinstance(entry.job, CheckJob)]
            workers = self._executor.workers_started if self._executor is not None else 0
            crashes = self._crashes
        by_state = {state: [e for e in entries if e.state is state] for state in KeyState}
        done = [(entry, entry.result.compile_s) for entry in by_state[KeyState.DONE] if entry.result is not None]
        compiled = [(entry, compile_s) for entry, compile_s in done if compile_s]
        slowest = sorted(((compile_s, entry.job.description) for entry, compile_s in compiled), reverse=True)
        failures = {e.job.key: (e.job.description, e.failure) for e in by_state[KeyState.FAILED] if e.failure}
        return PoolStats(
            submitted=len(entries),
            done=len(by_state[KeyState.DONE]),
            failed=len(by_state[KeyState.FAILED]),
            pending=len(by_state[KeyState.PENDING]),
            compiled=len(compiled),
            workers_started=workers,
            workers_crashed=crashes,
            slowest=tuple(slowest[:10]),
            failures=failures,
        )

    # The life of the pool.

    def adopt_environ(self) -> None:
        """Take this process's environment, as it is now, for that of the compile processes.

        Called when the modules that hold compile functions have been imported: a compile process imports them anew.
        What single calls have otherwise travels with each job.
        """
        with self._changed:
            if self.environ_difference():
                self._environ = {**os.environ, **GPU_BLIND}

    @property
    def environ(self) -> dict[str, str]:
        """The environment of the compile processes, apart from what is pinned."""
        return dict(self._environ)

    def tell_imports(self, imports: Imports) -> None:
        """Take what another process, which shares this pool, needs compile processes to import."""
        with self._changed:
            told = self._told_imports
            self._told_imports = imports if told is None else told.merged(imports)

    @property
    def is_started(self) -> bool:
        return self._thread is not None

    def prewarm(self) -> None:
        with self._changed:
            if self._broken is None and not self._is_closing:
                self._is_server_wanted = True
                self._ensure_thread()
        self._wake()

    def shutdown(self) -> None:
        """End every process at once; what is still pending fails. May be called again."""
        if os.getpid() != self.owner_pid:
            return
        with self._changed:
            self._is_closing = True
            thread = self._thread
        self._wake()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=20)
        with self._changed:
            self._fail_pending("the pool has been shut down")
            self._changed.notify_all()
        _live_pools.discard(self)

    def _wait(self, keys: list[str], is_over: Callable[[], bool], timeout_s: float | None) -> None:
        with self._changed:
            entries = [self._entries[key] for key in keys if key in self._entries]
            for entry in entries:
                entry.waiters += 1
        self._wake()
        try:
            with self._changed:
                self._changed.wait_for(is_over, timeout_s)
        finally:
            with self._changed:
                for entry in entries:
                    entry.waiters -= 1

    def _wake(self) -> None:
        executor = self._executor
        if executor is not None:
            executor.wake()

    def _needs(self) -> Needs:
        with self._changed:
            imports = self._told_imports if self._is_shared else None
        return Needs(dict(self._environ), imports or self._imports())

    def _ensure_thread(self) -> None:
        if self._thread is None:
            self._executor = LocalExecutor(self.jobs, timeout_s=self._timeout_s, needs=self._needs)
            self._thread = threading.Thread(target=self._run, name="quack-compile-pool", daemon=True)
            self._thread.start()

    # The pool's thread. The server is started by it and lives as long as it does: the kernel ends the server when the
    # thread that started it ends.

    def _run(self) -> None:
        executor = self._executor
        assert executor is not None
        try:
            while not self._is_closing and self._broken is None:
                if self._is_server_wanted:
                    self._is_server_wanted = False
                    self._start_server(executor)
                self._dispatch(executor)
                for event in executor.poll(timeout_s=None):
                    self._apply(event)
        except Exception as error:  # noqa: BLE001 - a fault of ours must not leave tests waiting for ever
            self._break(f"the compile pool failed: {type(error).__name__}: {error}")
        finally:
            executor.close()
            with self._changed:
                self._fail_pending(self._broken or "the pool has been shut down")
                self._changed.notify_all()

    def _start_server(self, executor: LocalExecutor) -> None:
        try:
            executor.start_server()
        except OSError as error:
            self._break(f"no process could be started ({error})")

    def _dispatch(self, executor: LocalExecutor) -> None:
        while executor.free_slots > 0 and self._broken is None:
            with self._changed:
                queued = [
                    QueuedKey(key, entry.waiters, entry.order)
                    for key, entry in self._entries.items()
                    if entry.state is KeyState.PENDING and not entry.is_running
                ]
                key = next_key(queued)
                if key is None:
                    return
                entry = self._entries[key]
                entry.is_running, entry.starts = True, entry.starts + 1
            try:
                executor.start(entry.job)
            except OSError as error:
                self._break(f"no compile process could be started ({error})")

    def _apply(self, event: Event) -> None:
        if isinstance(event, Broken):
            self._server_failures += 1
            if self._server_failures >= _MAX_SERVER_FAILURES:
                self._break(event.reason)
            return
        if isinstance(event, PreloadFailed):
            for module, reason in event.failed.items():
                self._notices.add(f"compile processes cannot import {module} ({reason})")
            return
        with self._changed:
            entry = self._entries[event.key]
            if isinstance(event, Started):
                self._server_failures = 0
            elif isinstance(event, Finished):
                self._finish(entry, event)
            elif isinstance(event, TimedOut):
                self._fail(entry, CompileFailure(FailureKind.TIMED_OUT, _timeout_text(event), event.stderr))
            elif isinstance(event, Crashed):
                self._crashes += 1
                if event.exit_code not in _FOREIGN_SIGNALS or not self._start_again(entry):
                    self._fail(entry, CompileFailure(FailureKind.CRASHED, _crash_text(event), event.stderr))
            elif not self._start_again(entry):
                self._fail(entry, CompileFailure(FailureKind.POOL, event.reason))
            self._changed.notify_all()

    def _finish(self, entry: _Entry, event: Finished) -> None:
        result = event.result
        if result.failure is not None:
            self._fail(entry, result.failure)
            return
        entry.state, entry.is_running = KeyState.DONE, False
        entry.result = result
        self._settled += 1

    def _start_again(self, entry: _Entry) -> bool:
        entry.is_running = False
        return entry.starts < _MAX_STARTS

    def _fail(self, entry: _Entry, failure: CompileFailure) -> None:
        entry.state, entry.is_running, entry.failure = KeyState.FAILED, False, failure
        self._settled += 1

    def _fail_pending(self, reason: str) -> None:
        for entry in self._entries.values():
            if entry.state is KeyState.PENDING:
                self._fail(entry, CompileFailure(FailureKind.POOL, reason))

    def _break(self, reason: str) -> None:
        self._broken = reason
        self._notices.add(f"kernels are compiled in the test process: {reason}")


def _jobs_from_environ() -> int | None:
    from pytest_quack.settings import resolve

    return resolve({"--async-compile": ""}).jobs


def _crash_text(event: Crashed) -> str:
    if event.exit_code is None:
        how = "was lost"
    elif event.exit_code < 0:
        how = f"was killed by {_signal_name(-event.exit_code)}"
        if event.exit_code in _FOREIGN_SIGNALS:
            how += f" {_MAX_STARTS} times; the system may be out of memory, so lower --async-compile"
    else:
        how = f"exited with status {event.exit_code}"
    said = f" Its last words: {event.stderr[-1500:]}" if event.stderr else ""
    return f"the process that compiled it (pid {event.pid}) {how}. It is not compiled in the test process.{said}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _timeout_text(event: TimedOut) -> str:
    said = f" Its last words: {event.stderr[-1500:]}" if event.stderr else ""
    return (
        f"its compile was ended after {event.timeout_s:g} s (pid {event.pid}). If it only needs longer, raise "
        f"--async-compile-timeout or QUACK_COMPILE_TIMEOUT. It is not compiled in the test process.{said}"
    )


@atexit.register
def _shutdown_all() -> None:
    for pool in list(_live_pools):
        pool.shutdown()
