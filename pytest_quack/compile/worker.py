"""What a compile process runs: one job after another, each with the environment and directory of whoever asked.

It answers each job over its own connection, so that a process that dies takes nobody else's answer with it:

    ("ready",)                 it can take a job
    ("started", key)           the compile itself begins; the time limit counts from here
    ("result", CompileResult)  done, or why not
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import sys
import traceback
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

from pytest_quack.backends import find_backend
from pytest_quack.cache.directory import CacheDirectory
from pytest_quack.compile.job import CheckJob, CompileFailure, CompileResult, FailureKind, Job, TracedJob
from pytest_quack.compile.process import die_with_parent, ignore_terminal_signals
from pytest_quack.runtime import Runtime, replace_runtime
from pytest_quack.settings import Settings


def main(worker_id: int, parent_pid: int, connection_fd: int, stderr_fd: int) -> None:
    """Serve jobs until the pool closes the connection."""
    die_with_parent(parent_pid)
    ignore_terminal_signals()
    os.dup2(stderr_fd, 1)
    os.dup2(stderr_fd, 2)
    os.close(stderr_fd)
    connection = Connection(connection_fd)
    connection.send(("ready",))
    while True:
        try:
            job = pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionError):
            return
        with contextlib.suppress(OSError):
            os.ftruncate(2, 0)  # what is kept for a crash report is that of the job that crashed
        result = run_job(job, connection)
        sys.stdout.flush()
        sys.stderr.flush()
        connection.send(("result", result))


def run_job(job: Job, connection: Connection) -> CompileResult:
    """The result of one job; whatever it raises becomes a failure that says so."""
    try:
        with _surroundings_of(job):
            from pytest_quack.cache.decorator import find_jit_function
            from pytest_quack.cache.traced import run_check_job, run_traced_job

            replace_runtime(_runtime_for(job.asker.store_root, job.asker.settings))
            on_start = lambda: connection.send(("started", job.key))  # noqa: E731
            if isinstance(job, TracedJob):
                return run_traced_job(job, on_start)
            if isinstance(job, CheckJob):
                return run_check_job(job, on_start)
            try:
                jit = find_jit_function(job.module, job.qualname, job.file)
            except BaseException as error:  # noqa: BLE001 - importing a user's module may raise anything
                reason = f"a compile process cannot import it ({type(error).__name__}: {error})"
                return CompileResult(job.key, CompileFailure(FailureKind.REFUSED, reason, traceback.format_exc()))
            if job.asker.settings.is_interception_on:
                _intercept(jit.backend_name)
            return jit.run_job(job, on_start)
    except BaseException as error:  # noqa: BLE001 - a compile may raise anything; the asking process decides
        message = f"{type(error).__name__}: {error}".strip()
        return CompileResult(job.key, CompileFailure(FailureKind.RAISED, message, traceback.format_exc()))


@functools.cache
def _intercept(backend_name: str) -> None:
    """From here on a compile in this process has its trace's content key, and ends early where an artifact is there."""
    from pytest_quack.cache.traced import TraceCache

    interception = find_backend(backend_name).interception(
        TraceCache(backend_name, is_asking=False), lambda notice: None
    )
    if interception is not None:
        interception.install()


@functools.lru_cache(maxsize=8)
def _runtime_for(store_root: str, settings: Settings) -> Runtime:
    """The asking process has opened the directory and decided to trust it."""
    if not store_root:
        return Runtime(replace(settings, is_cache_enabled=False), is_reported=True)
    return Runtime(settings, is_reported=True, directory=CacheDirectory(Path(store_root), is_writable=True))


@contextlib.contextmanager
def _surroundings_of(job: Job) -> Iterator[None]:
    """The environment and the working directory of the asking process, for the length of one job."""
    saved = dict(os.environ)
    try:
        directory = os.getcwd()
    except OSError:
        directory = "/"
    try:
        _set_environ(job.asker.environ)
        if job.asker.cwd:
            with contextlib.suppress(OSError):
                os.chdir(job.asker.cwd)
        yield
    finally:
        _set_environ({**dict.fromkeys(os.environ), **saved})
        with contextlib.suppress(OSError):
            os.chdir(directory)


def _set_environ(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
