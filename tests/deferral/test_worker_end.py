"""A worker whose controller has died, or that is interrupted, ends soon."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from pytest_quack.deferral import worker_end
from support.inner import ROOT

pytestmark = pytest.mark.light
PARENT = """
    import os, sys, time
    from pathlib import Path
    leftover = Path(sys.argv[1])
    if os.fork() == 0:
        from pytest_quack.deferral import worker_end
        worker_end._GRACE_S = 0.3
        {prepare}
        worker_end.end_with(os.getppid(), leftover)
        (leftover.parent / "ready").touch()
        try:
            while True:
                time.sleep(0.01)
        except KeyboardInterrupt:
            (leftover.parent / "interrupted").touch()
            if {hangs}:
                time.sleep(60)
        os._exit(0)
    while not (leftover.parent / "ready").exists():
        time.sleep(0.01)
    os._exit(0)
"""


@pytest.mark.parametrize("hangs", [False, True])
@pytest.mark.parametrize("prepare", ["", "del os.pidfd_open"], ids=["pidfd", "without pidfd"])
def test_child_of_a_process_that_dies_is_interrupted_and_ended(tmp_path: Path, prepare: str, hangs: bool) -> None:
    leftover = tmp_path / "left"
    leftover.mkdir()
    (leftover / "pool").touch()
    read, write = os.pipe()  # closed by the last of the processes
    script = textwrap.dedent(PARENT).format(prepare=prepare, hangs=hangs)
    subprocess.run(
        [sys.executable, "-c", script, str(leftover)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        pass_fds=[write],
        check=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    os.close(write)
    assert os.read(read, 1) == b""
    os.close(read)
    assert (tmp_path / "interrupted").exists()
    assert not leftover.exists()


def test_process_that_is_no_child_is_left_alone(tmp_path: Path) -> None:
    import threading

    worker_end.end_with(os.getpid(), tmp_path)
    assert not any(thread.name == "quack-orphan" for thread in threading.enumerate())


def test_traceback_of_an_interrupt_is_cut_to_its_end() -> None:
    try:
        test_process_that_is_no_child_is_left_alone(1 / 0)  # type: ignore[arg-type]
    except ZeroDivisionError:
        excinfo = pytest.ExceptionInfo.from_current()
    inner = excinfo.traceback
    worker_end.QuietInterrupt().pytest_keyboard_interrupt(excinfo)
    assert len(excinfo.traceback) == 1
    assert excinfo.traceback[-1].lineno == inner[-1].lineno
