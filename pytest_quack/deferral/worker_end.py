"""How an xdist worker ends before its time: soon, whatever it does.

Where its controller has died, nobody can receive what its tests report. execnet ends such a worker too, after 5 to 15
seconds in which it goes on with its tests, and with compiles in its own process.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Final

import pytest

# The command by which a controller that is interrupted stops its workers.
INTERRUPT: Final = "quack_interrupt"
# The command that leaves out the tests that are not finished, after -x or --maxfail.
GIVE_UP: Final = "quack_give_up"
# From the interrupt, after which fixtures are torn down, to the end of the process whatever it does.
_GRACE_S: Final = 3.0
_POLL_S: Final = 0.5


class QuietInterrupt:
    """Keeps pytest from formatting the traceback of an interrupt, which takes a second or more and nobody sees."""

    has_happened = threading.Event()

    @pytest.hookimpl(tryfirst=True)
    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        self.has_happened.set()
        excinfo.traceback = excinfo.traceback[-1:]


def end_with(parent_pid: int, leftover: Path) -> None:
    """Have this process interrupted, and soon ended, when its parent dies; `leftover` is then removed.

    Does nothing where that process is not the parent: what started this one then sees to its end.
    """
    if os.getppid() == parent_pid:
        threading.Thread(target=_watch, args=(parent_pid, leftover), name="quack-orphan", daemon=True).start()


def end_soon() -> None:
    """Stop this process's main thread as Ctrl-C does, unless that has happened, and soon end it whatever it does."""
    threading.Thread(target=_end, name="quack-end", daemon=True).start()


def _end() -> None:
    if not QuietInterrupt.has_happened.wait(_POLL_S):  # a terminal may have told this process too
        os.kill(os.getpid(), signal.SIGINT)
    time.sleep(_GRACE_S)
    os._exit(1)


def _watch(parent_pid: int, leftover: Path) -> None:
    _wait_for_end(parent_pid)
    shutil.rmtree(leftover, ignore_errors=True)
    _end()


def _wait_for_end(pid: int) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except (AttributeError, OSError):  # not Linux, an old one, or the process has ended meanwhile
        descriptor = None
    if descriptor is not None:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        while os.getppid() == pid and not poll.poll(None):
            pass
        os.close(descriptor)
    while os.getppid() == pid:  # it has ended and is about to hand its children over
        time.sleep(_POLL_S if descriptor is None else 0.01)
