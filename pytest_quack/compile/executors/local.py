"""Compile processes on this machine, forked from one server process; each dies alone.

One thread owns an executor: it calls `poll`, which returns what happened, and `start`, which hands a job to a free
process. Every process has a connection of its own and takes one job at a time, so there is no lock or queue that a
dying process could leave in a bad state. (pebble and concurrent.futures share a pipe and its locks between all
processes: one that is killed at the wrong moment fails or blocks the jobs of the others.)

What can go wrong, and what `poll` says then:

    a process dies while it compiles        Crashed, with its signal and its last words
    a process compiles for too long         it is killed: TimedOut
    a process dies or hangs before that     Lost: the job may be started again
    the server dies                         Lost for every job; the next `start` starts a new server
    the server cannot start                 Broken
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from typing import IO, Any, Final

from pytest_quack.compile import forkserver
from pytest_quack.compile.job import CompileResult, Imports, Job

START_TIMEOUT_S: Final = 180.0
_STATUS_WAIT_S: Final = 5.0
_TAIL_BYTES: Final = 4000
_BOOTSTRAP: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from pytest_quack.compile.forkserver import main; main(int(sys.argv[1]))"
)


@dataclass(frozen=True, slots=True)
class Started:
    key: str


@dataclass(frozen=True, slots=True)
class Finished:
    key: str
    result: CompileResult


@dataclass(frozen=True, slots=True)
class Crashed:
    """`exit_code` is negative for a signal, as in subprocess; None where it could not be learnt."""

    key: str
    pid: int
    exit_code: int | None
    stderr: str


@dataclass(frozen=True, slots=True)
class TimedOut:
    key: str
    pid: int
    timeout_s: float
    stderr: str


@dataclass(frozen=True, slots=True)
class Lost:
    """The job did not begin, or not through its own fault; it may be started again."""

    key: str
    reason: str


@dataclass(frozen=True, slots=True)
class Broken:
    """No compile process can be had."""

    reason: str


@dataclass(frozen=True, slots=True)
class PreloadFailed:
    failed: dict[str, str]


Event = Started | Finished | Crashed | TimedOut | Lost | Broken | PreloadFailed


@dataclass(frozen=True, slots=True)
class Needs:
    """What compile processes need.

    Attributes:
        environ: their whole environment, apart from what is pinned.
        imports: what the server imports before it forks them.
    """

    environ: Mapping[str, str]
    imports: Imports


_NO_IMPORTS: Final = Imports((), {}, (), ())


@dataclass(slots=True)
class _Worker:
    connection: Connection
    stderr: IO[bytes]
    deadline: float
    pid: int = 0
    is_ready: bool = False
    job: Job | None = None
    has_begun: bool = False
    died_at: float | None = None
    exit_code: int | None = None
    events: list[Event] = field(default_factory=list)


class LocalExecutor:
    """At most `jobs` compile processes. Not thread-safe, apart from `wake`.

    Args:
        jobs: how many processes at most.
        timeout_s: the longest that one compile may take.
        needs: asked when the server starts and before a process is made; what they need.
    """

    def __init__(self, jobs: int, *, timeout_s: float, needs: Callable[[], Needs]) -> None:
        self.jobs: Final = jobs
        self.workers_started = 0
        self._timeout_s = timeout_s
        self._needs = needs
        self._server: subprocess.Popen[bytes] | None = None
        self._server_stderr: IO[bytes] | None = None
        self._control: socket.socket | None = None
        self._told = Needs({}, _NO_IMPORTS)  # what the server has been told so far
        self._ready_deadline: float | None = None
        self._preloads_under_way = 0
        self._workers: dict[int, _Worker] = {}
        self._next_id = 0
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)

    def wake(self) -> None:
        """Make a `poll` that is under way return soon. May be called from any thread."""
        with contextlib.suppress(OSError):
            self._wake_write.send(b"x")

    @property
    def free_slots(self) -> int:
        """How many more jobs can be started now."""
        return self.jobs - sum(1 for worker in self._workers.values() if worker.job is not None)

    def start_server(self) -> None:
        """Have a server that imports what is needed, while the caller goes on. Raises OSError.

        One that runs already is told what has come to be needed since; one that began with another environment, whose
        imports may have gone otherwise, is replaced unless it is at work.
        """
        needs = self._needs()
        is_busy = any(worker.job is not None for worker in self._workers.values())
        if self._server is not None and dict(self._told.environ) != dict(needs.environ) and not is_busy:
            self._drop_server()
        if self._server is None:
            self._launch_server(needs)
        imports, told = needs.imports, self._told.imports
        modules = tuple(name for name in imports.modules if name not in told.modules)
        if told.backends and not modules and imports.pinned == told.pinned:
            return
        message = {
            "op": "preload",
            "sys_path": list(imports.sys_path),
            "pinned": dict(imports.pinned),
            "backends": list(imports.backends),
            "modules": list(modules),
        }
        assert self._control is not None
        with contextlib.suppress(OSError):  # a server that is gone already is found out by the next poll
            forkserver.send(self._control, message)
        self._told = replace(self._told, imports=replace(imports, modules=(*told.modules, *modules)))
        self._preloads_under_way += 1
        self._ready_deadline = time.monotonic() + START_TIMEOUT_S

    def _launch_server(self, needs: Needs) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._server_stderr = tempfile.TemporaryFile(prefix="quack-forkserver-")  # noqa: SIM115 - closed in _drop
            command = [sys.executable, *_interpreter_flags(), "-c", _BOOTSTRAP, str(theirs.fileno())]
            self._server = subprocess.Popen(
                [*command, json.dumps(needs.imports.sys_path)],
                env={**needs.environ, **needs.imports.pinned},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._server_stderr,
                stderr=self._server_stderr,
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self._control = ours
        self._told = Needs(needs.environ, _NO_IMPORTS)
        with contextlib.suppress(OSError):
            forkserver.send(ours, {"op": "start", "parent_pid": os.getpid()})

    def start(self, job: Job) -> None:
        """Hand a job to a free process, made if need be. Raises OSError where none can be made."""
        worker = next((w for w in self._workers.values() if w.job is None and w.died_at is None), None)
        if worker is None:
            worker = self._spawn()
        worker.job = job
        worker.has_begun = False
        # Until the compile begins the process may wait for the key's lock, which has the same limit.
        worker.deadline = time.monotonic() + self._timeout_s + START_TIMEOUT_S
        with contextlib.suppress(OSError):  # a process that is gone already is found out by the next poll
            worker.connection.send_bytes(pickle.dumps(job))

    def poll(self, timeout_s: float | None) -> list[Event]:
        """Wait until something happens, at most `timeout_s` seconds, and say what."""
        sources: list[Any] = [self._wake_read]
        if self._control is not None:
            sources.append(self._control)
        sources += [w.connection for w in self._workers.values() if w.died_at is None]
        ready = wait(sources, self._until_next_deadline(timeout_s))
        events: list[Event] = []
        if self._wake_read in ready:
            with contextlib.suppress(BlockingIOError):
                self._wake_read.recv(4096)
        for worker in list(self._workers.values()):
            if worker.connection in ready:
                events += self._read_worker(worker)
        if self._control is not None and self._control in ready:
            events += self._read_server()
        events += self._check_deadlines()
        events += self._bury()
        return events

    def close(self) -> None:
        """End every process, at once."""
        for worker in self._workers.values():
            _kill(worker.pid)
        self._drop_server()
        self._wake_read.close()
        self._wake_write.close()

    def _until_next_deadline(self, timeout_s: float | None) -> float | None:
        deadlines = [w.deadline for w in self._workers.values() if w.job is not None and w.died_at is None]
        deadlines += [w.died_at + _STATUS_WAIT_S for w in self._workers.values() if w.died_at is not None]
        if self._ready_deadline is not None:
            deadlines.append(self._ready_deadline)
        if not deadlines:
            return timeout_s
        remaining = max(0.0, min(deadlines) - time.monotonic())
        return remaining if timeout_s is None else min(remaining, timeout_s)

    def _spawn(self) -> _Worker:
        self.start_server()
        assert self._control is not None
        ours, theirs = socket.socketpair()
        stderr = tempfile.TemporaryFile(prefix="quack-compile-")  # noqa: SIM115 - closed in _bury
        worker_id, self._next_id = self._next_id, self._next_id + 1
        # Opened once more for appending: whatever the process truncates, it goes on at the end.
        appending = os.open(f"/proc/self/fd/{stderr.fileno()}", os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            forkserver.send(self._control, {"op": "spawn", "id": worker_id}, (theirs.fileno(), appending))
        except ConnectionError:
            pass  # the server is gone: the next poll says so, and the job is lost with it
        except OSError:
            ours.close()
            stderr.close()
            raise
        finally:
            theirs.close()
            os.close(appending)
        worker = _Worker(Connection(ours.detach()), stderr, deadline=0.0)
        self._workers[worker_id] = worker
        self.workers_started += 1
        return worker

    def _read_worker(self, worker: _Worker) -> list[Event]:
        try:
            kind, *values = worker.connection.recv()
        except (EOFError, OSError, pickle.UnpicklingError):
            worker.died_at = time.monotonic()
            return []
        if kind == "ready":
            worker.is_ready = True
        elif kind == "started":
            worker.has_begun = True
            worker.deadline = time.monotonic() + self._timeout_s
            return [Started(values[0])]
        elif kind == "result" and worker.job is not None:
            key, worker.job = worker.job.key, None
            return [Finished(key, values[0])]
        return []

    def _read_server(self) -> list[Event]:
        assert self._control is not None
        try:
            message, _ = forkserver.receive(self._control)
        except OSError:
            message = None
        if message is None:
            return self._server_died()
        if message["op"] == "ready":
            self._preloads_under_way -= 1
            if not self._preloads_under_way:
                self._ready_deadline = None
            return [PreloadFailed(message["failed"])] if message["failed"] else []
        worker = self._workers.get(message["id"])
        if worker is not None and message["op"] == "spawned":
            worker.pid = message["pid"]
        elif worker is not None and message["op"] == "exited":
            worker.exit_code = message["status"]
            worker.died_at = worker.died_at or time.monotonic()
        return []

    def _server_died(self) -> list[Event]:
        """Everything that it forked dies with it."""
        was_ready = self._ready_deadline is None
        events: list[Event] = []
        for worker in self._workers.values():
            _kill(worker.pid)
            while worker.died_at is None and worker.connection.poll():
                events += self._read_worker(worker)
            if worker.job is not None:
                events.append(Lost(worker.job.key, "the server that compile processes are forked from died"))
        stderr = self._drop_server()
        if not was_ready:
            events.append(Broken(f"the server for compile processes did not start: {stderr or 'it said nothing'}"))
        return events

    def _drop_server(self) -> str:
        """End the server and forget everything that belonged to it; returns its last words."""
        if self._control is not None:
            self._control.close()
        if self._server is not None:
            self._server.kill()
            self._server.wait()
        stderr = _tail(self._server_stderr)
        for worker in self._workers.values():
            worker.connection.close()
            worker.stderr.close()
        if self._server_stderr is not None:
            self._server_stderr.close()
        self._workers.clear()
        self._control = self._server = self._server_stderr = self._ready_deadline = None
        self._preloads_under_way = 0
        return stderr

    def _check_deadlines(self) -> list[Event]:
        now = time.monotonic()
        if self._ready_deadline is not None and now > self._ready_deadline:
            lost: list[Event] = [Lost(w.job.key, "no compile process") for w in self._workers.values() if w.job]
            stderr = self._drop_server()
            reason = f"the server for compile processes was not ready after {START_TIMEOUT_S:g} s"
            return [*lost, Broken(f"{reason}: {stderr or 'it said nothing'}")]
        events: list[Event] = []
        for worker in self._workers.values():
            if worker.job is None or worker.died_at is not None or now <= worker.deadline:
                continue
            if self._ready_deadline is not None:
                continue  # the server is still importing: the process does not exist yet
            key, worker.job = worker.job.key, None
            if worker.has_begun:
                events.append(TimedOut(key, worker.pid, self._timeout_s, _tail(worker.stderr)))
            else:
                events.append(Lost(key, f"compile process {worker.pid} did not begin"))
            _kill(worker.pid)
            worker.died_at = now
        return events

    def _bury(self) -> list[Event]:
        """Report and forget processes that have died, once their exit status is known or does not come."""
        events: list[Event] = []
        now = time.monotonic()
        for worker_id, worker in list(self._workers.items()):
            if worker.died_at is None or (worker.exit_code is None and now < worker.died_at + _STATUS_WAIT_S):
                continue
            if worker.exit_code is None:
                _kill(worker.pid)
            if worker.job is not None:
                key = worker.job.key
                if worker.has_begun or worker.is_ready:
                    events.append(Crashed(key, worker.pid, worker.exit_code, _tail(worker.stderr)))
                else:
                    events.append(Lost(key, f"compile process {worker.pid} died while it started"))
            worker.connection.close()
            worker.stderr.close()
            del self._workers[worker_id]
        return events


def _interpreter_flags() -> list[str]:
    """The flags that make another interpreter behave as this one (-O, -W, -X and the like)."""
    return list(getattr(subprocess, "_args_from_interpreter_flags", list)())


def _kill(pid: int) -> None:
    if pid:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _tail(file: IO[bytes] | None) -> str:
    if file is None or file.closed:
        return ""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _TAIL_BYTES))
    return file.read().decode(errors="replace").strip()
