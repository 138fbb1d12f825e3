"""Which test a process is running, in a file that can still be read when the process is dead."""

from __future__ import annotations

import contextlib
import mmap
import struct
from pathlib import Path
from typing import Final

_FORMAT: Final = struct.Struct("=q")
_NONE: Final = -1


def create(path: Path) -> None:
    """Make the file; nothing is running."""
    path.write_bytes(_FORMAT.pack(_NONE))


def read(path: Path) -> int | None:
    """The test that was begun last and not ended; None where there is none, or no file."""
    with contextlib.suppress(OSError, struct.error):
        (index,) = _FORMAT.unpack(path.read_bytes())
        return None if index == _NONE else int(index)
    return None


class RunningMark:
    """The file as the process that runs tests sees it. Setting it is one write to memory."""

    def __init__(self, path: Path) -> None:
        """Open a file that `create` has made. Raises OSError."""
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _FORMAT.size)

    def set(self, index: int | None) -> None:
        """Say which test runs now."""
        _FORMAT.pack_into(self._memory, 0, _NONE if index is None else index)
