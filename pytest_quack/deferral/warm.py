"""Whether a run will find all its kernels in the store, as far as the run before it can tell.

A test that may have to step aside has its state taken before each attempt and its reports held back, for 0.2 ms.
Where nothing will be missing that is for nothing. So a complete run leaves a mark in the store, under a digest of its
tests; the next run of the same tests trusts it if no source of the project has changed since the run that left it
began. It is a hint: the first test that misses a kernel all the same waits for it, and from the next test on all may
step aside. Where tests may have to be run again for want of device memory, it is of no use: that needs the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from pytest_quack.cache.store import Store

_DIRECTORY: Final = "warm"
_VARIABLES: Final = ("CUTE_DSL_", "QUACK_COMPILE_")


class WarmMark:
    """The mark of one set of tests in one store."""

    def __init__(self, store: Store, nodeids: Iterable[str], began_ns: int) -> None:
        """Take the store, the tests in the order in which they were collected, and when this run began."""
        digest = hashlib.sha256()
        variables = sorted(f"{n}={value}" for n, value in os.environ.items() if n.startswith(_VARIABLES))
        for text in (sys.version, *variables, *nodeids):
            digest.update(text.encode(errors="surrogateescape") + b"\0")
        self._path = Path(store.root, _DIRECTORY, digest.hexdigest())
        self._is_writable = store.is_writable
        self._began_ns = began_ns

    def is_fresh(self) -> bool:
        """Whether there is one, and no file of the project that this process has imported is newer."""
        try:
            made_ns = self._path.stat().st_mtime_ns
        except OSError:
            return False
        return all(changed_ns < made_ns for changed_ns in _changes())

    def write(self) -> None:
        """Leave the mark; without a word where that cannot be done, since it only saves time."""
        if self._is_writable:
            with contextlib.suppress(OSError):
                self._path.parent.mkdir(mode=0o700, exist_ok=True)
                self._path.touch(mode=0o600)
                os.utime(self._path, ns=(self._began_ns, self._began_ns))


def _changes() -> Iterator[int]:
    """When the files of imported modules were changed, apart from those of Python and of installed distributions."""
    import sysconfig  # reads a file: not for a controller, which only leaves marks

    foreign = {sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if isinstance(path, str) and not path.startswith(tuple(foreign)):
            with contextlib.suppress(OSError):
                yield os.stat(path).st_mtime_ns
