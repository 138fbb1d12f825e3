"""Small things that every process of the pool does to itself."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel end this process when its parent ends, however that happens.

    A compile holds the interpreter for seconds, so a thread that watches the parent would come too late. Linux only;
    elsewhere a process notices at the end of its task that nobody listens.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it ended before we asked
        os._exit(1)


def ignore_terminal_signals() -> None:
    """Leave Ctrl-C to pytest, which ends its pool itself."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
