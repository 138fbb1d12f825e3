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
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from pytest_quack.backends import find_backend
from pytest_quack.compile import preload
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
    Asker,
    CheckJob,
    CompileFailure,
    CompileResult,
    FailureKind,
    Job,
    KeyState,
    PoolStats,
)
from pytest_quack.compile.limits import default_jobs
from pytest_quack.compile.priority import QueuedKey, next_key
from pytest_quack.errors import CompilePending
from pytest_quack.runtime import Notices, Runtime, get_runtime

# How often a key that was lost through no fault of its own is started again, and how often a server in a row.
_MAX_STARTS: Final = 3
_MAX_SERVER_FAILURES: Final = 3
# Signals that somebody else sends (the kernel's out-of-memory killer, an administrator), not the compiler.
_FOREIGN_SIGNALS: Final = {-signal.SIGKILL, -signal.SIGTERM}
# No device to see, and torch looks for devices through NVML, which needs no driver that is initialised.
_GPU_BLIND: Final = {"CUDA_VISIBLE_DEVICES": "", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
# Variables that differ between processes without changing what is compiled.
_NOT_SHIPPED: Final = frozenset({*_GPU_BLIND, "NVIDIA_VISIBLE_DEVICES", "PYTEST_CURRENT_TEST", "_"})
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


PendingPolicy = Callable[[str, str], None]


class CompilePool:
    """Compiles keys in processes of their own.

    Nothing is started before the first key is submitted or `prewarm` is called. Safe to use from several threads of
    the process that made it; a child made by `fork` must not use it (`get_active_pool` gives it none).

    Args:
        jobs: how many compile processes at most; None or 0 for what QUACK_COMPILE_JOBS says, else as many as the
            machine allows.
        timeout_s: the longest that one compile may take; None for what the settings say.
        notices: where things to tell the user once go.

    Raises ValueError where `jobs` is negative.
    """

    def __init__(
        self, jobs: int | None = None, *, timeout_s: float | None = None, notices: Notices | None = None
    ) -> None:
        if jobs is not None and jobs < 0:
            raise ValueError(f"a pool needs at least 1 compile process, not {jobs}")
        self.owner_pid: Final = os.getpid()
        self.jobs: Final = jobs or _jobs_from_environ() or default_jobs()
        self.pending_policy: PendingPolicy | None = None
        self._timeout_s = timeout_s or get_runtime().settings.timeout_s
        self._notices = notices or get_runtime().notices
        self._environ = {**os.environ, **_GPU_BLIND}
        self._pinned: dict[str, str] = {}  # variables that compile processes have of their own
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
        """The key's state, and why it failed if it did."""
        with self._changed:
            entry = self._entries.get(key)
            return (KeyState.NEW, None) if entry is None else (entry.state, entry.failure)

    def submit(self, job: Job) -> KeyState:
        """Have a job's key compiled, unless it was submitted before. Returns the key's state."""
        with self._changed:
            entry = self._entries.get(job.key)
            if entry is not None:
                return entry.state
            entry = self._entries[job.key] = _Entry(job, order=len(self._entries))
            if self._broken is not None or self._is_closing:
                self._fail(entry, CompileFailure(FailureKind.POOL, self._broken or "the pool has been shut down"))
            else:
                self._pin()
                self._ensure_thread()
        self._wake()
        return entry.state

    def wait(self, key: str, timeout_s: float | None = None) -> KeyState:
        """Wait until a key is no longer pending, at most `timeout_s` seconds; returns its state then."""
        self.wait_any([key], timeout_s)
        return self.poll(key)[0]

    def wait_any(self, keys: Iterable[str], timeout_s: float | None = None) -> tuple[str, ...]:
        """Wait until at least one of `keys` is no longer pending; returns those, none after `timeout_s` seconds.

        Of no keys there is nothing to wait for: it returns at once.
        """
        wanted = list(keys)

        def settled() -> tuple[str, ...]:
            return tuple(key for key in wanted if self.poll(key)[0] is not KeyState.PENDING)

        self._wait(wanted, lambda: not wanted or bool(settled()), timeout_s)
        return settled()

    def add_waiter(self, key: str) -> None:
        """Say that one more test cannot go on without this key: it is compiled before those that nobody waits for."""
        with self._changed:
            if key in self._entries:
                self._entries[key].waiters += 1

    def await_or_raise(self, key: str, description: str) -> None:
        """What happens to a call whose key is pending: it waits here, or CompilePending tells it to come back."""
        if self.pending_policy is None:
            raise CompilePending(key, description)
        self.pending_policy(key, description)

    @property
    def settled(self) -> int:
        """How many keys have stopped being pending so far: a cheap way to see that something has changed."""
        return self._settled

    def result(self, key: str) -> CompileResult | None:
        """What the compile process answered for a done key: with the artifact, where that could not be stored."""
        with self._changed:
            entry = self._entries.get(key)
            return entry.result if entry is not None else None

    def stats(self) -> PoolStats:
        """Counts so far."""
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
                self._environ = {**os.environ, **_GPU_BLIND}

    @property
    def is_started(self) -> bool:
        return self._thread is not None

    def prewarm(self) -> None:
        """Start importing in the server now, so that the first miss does not have to wait for it.

        May be called again when more has been imported here.
        """
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

    def asker(self, runtime: Runtime) -> Asker:
        """What a job carries of this process, as it is now."""
        try:
            cwd = os.getcwd()
        except OSError:
            cwd = ""
        store = runtime.store
        root = str(store.root) if store is not None and store.is_writable else ""
        return Asker(cwd, self.environ_difference(), runtime.settings, root)

    def environ_difference(self) -> dict[str, str | None]:
        """Variables in which this process's environment now differs from that of the compile processes."""
        now, base = os.environ, self._environ
        changed: dict[str, str | None] = {name: value for name, value in now.items() if base.get(name) != value}
        changed.update({name: None for name in base if name not in now})
        return {n: value for n, value in changed.items() if n not in _NOT_SHIPPED and n not in self._pinned}

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

    def _pin(self) -> None:
        for name in preload.registered_backends():
            self._pinned.update(find_backend(name).worker_environ())

    def _needs(self) -> Needs:
        return Needs(dict(self._environ), dict(self._pinned), *preload.what_to_import())

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
