"""Runs that are ended from outside: what is left of them afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable
from typing import Final

import filelock
import psutil

from support.inner import InnerProject

MARK: Final = "RUN_MARK"


def _signal(*numbers: signal.Signals, to_all: bool) -> Callable[[subprocess.Popen[bytes]], None]:
    def send(process: subprocess.Popen[bytes]) -> None:
        for number in numbers:
            if to_all:  # as a terminal does
                os.killpg(process.pid, number)
            else:
                process.send_signal(number)
            time.sleep(0.3)

    return send


WAYS: Final = {
    "Ctrl-C": _signal(signal.SIGINT, to_all=True),
    "Ctrl-C twice": _signal(signal.SIGINT, signal.SIGINT, to_all=True),
    "SIGINT to the controller": _signal(signal.SIGINT, to_all=False),
    "SIGTERM": _signal(signal.SIGTERM, to_all=False),
    "SIGKILL": _signal(signal.SIGKILL, to_all=False),
}
_SUITE: Final = """
    import time
    import pytest
    from support import light

    @pytest.mark.parametrize("number", range(12))
    def test_kernel(number):
        assert light.build(f"k{number}", seconds=60.0)() == 1.0

    @pytest.fixture(scope="session")
    def wide():
        light.log("up")
        yield
        light.log("down")

    @pytest.mark.parametrize("number", range(4))
    def test_slow(number, wide):
        light.log("in a test")
        BODY
"""


def end(
    inner: InnerProject, way: str, *arguments: str, body: str = "time.sleep(60)", within_s: float = 5.0
) -> list[str]:
    """Run a suite, end it while compiles and a test of this `body` run, and return what is left after `within_s`."""
    mark = uuid.uuid4().hex
    inner.write("test_it.py", _SUITE.replace("BODY", textwrap.indent(textwrap.dedent(body), " " * 8).strip()))
    inner.clear_log()
    inner.environ[MARK] = mark
    inner.environ["TMPDIR"] = str(inner.root.parent)
    with subprocess.Popen(
        [sys.executable, "-m", "pytest", "-p", "pytest_quack", "-p", "xdist.plugin", "--async-compile=2", *arguments],
        cwd=inner.root,
        env=inner.run_environ(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        try:
            _wait_for_log(inner, "compile", 2)
            _wait_for_log(inner, "in a test", 1)
            WAYS[way](process)
            deadline = time.monotonic() + within_s
            while processes(mark) and time.monotonic() < deadline:
                process.poll()
                time.sleep(0.05)
        finally:
            left = [_kill(process) for process in processes(mark)]
    left += [f"lock {path.name}" for path in inner.cache.rglob("locks/*") if _is_held(str(path))]
    left += [f"directory {path.name}" for path in inner.root.parent.glob("quack-*")]
    return left


def processes(mark: str) -> list[psutil.Process]:
    """Processes of a run, found by a variable that all of them have inherited."""
    found = []
    for process in psutil.process_iter():
        try:
            is_ours = process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:  # it has ended, or is not ours to look at
            continue
        if is_ours:
            found.append(process)
    return found


def _kill(process: psutil.Process) -> str:
    try:
        text = f"process {process.pid} {' '.join(process.cmdline())[:120]}"
        process.kill()
    except psutil.NoSuchProcess:
        return f"process {process.pid}, which has ended meanwhile"
    return text


def _is_held(path: str) -> bool:
    try:
        filelock.FileLock(path).acquire(timeout=0.2).lock.release()
    except filelock.Timeout:
        return True
    return False


def _wait_for_log(inner: InnerProject, event: str, times: int) -> None:
    deadline = time.monotonic() + 60
    while inner.log_path.read_text().count(event) < times:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{event!r} did not happen:\n{inner.log_path.read_text()}")
        time.sleep(0.02)
