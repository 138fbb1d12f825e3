"""What this process knows beyond one call: settings, the store, counts, and what the user should be told once.

One object behind one accessor. The plugin replaces it at the start of a run and puts the former one back at the end;
without the plugin it is made from the environment at the first call.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from typing import Final

from pytest_quack import settings as settings_module
from pytest_quack.cache.directory import CacheDirectory, open_directory
from pytest_quack.cache.store import Store
from pytest_quack.errors import CacheDirectoryError
from pytest_quack.settings import Settings

logger: Final = logging.getLogger("pytest_quack")


class Notices:
    """Things to tell the user once, each with how often it happened.

    Kept for the terminal summary where the plugin reports them; logged at once where nobody does. They are no Python
    warnings: those would fail a test under `-W error` for something that is not its fault.
    """

    def __init__(self, *, is_reported: bool) -> None:
        self._is_reported = is_reported
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()

    def add(self, text: str) -> None:
        with self._lock:
            self.counts[text] += 1
            is_first = self.counts[text] == 1
        if is_first and not self._is_reported:
            logger.warning("%s", text)


class Runtime:
    """The state of one process, or of one pytest run in it.

    Attributes:
        hits: keys (direct keys, content keys of traces) whose artifact was loaded from the store.
        compiled_here: keys that this process compiled itself -> why not the pool ("" where there was no pool).
        uncached: how often a call could not be cached.
    """

    def __init__(
        self, settings: Settings, *, is_reported: bool = False, directory: CacheDirectory | None = None
    ) -> None:
        self.settings: Final = settings
        self.notices: Final = Notices(is_reported=is_reported)
        self.hits: set[str] = set()
        self.compiled_here: dict[str, str] = {}
        self.uncached = 0
        self._directory = directory
        self._store: Store | None = None
        self._is_opened = False
        self._lock = threading.Lock()

    @property
    def store(self) -> Store | None:
        """The store, opened at first use; None where artifacts are not kept on disk.

        Raises CacheDirectoryError where the user named a directory that cannot be used or trusted.
        """
        if not self._is_opened:
            with self._lock:
                if not self._is_opened:
                    self._store = self._open()
                    self._is_opened = True
        return self._store

    def _open(self) -> Store | None:
        if not self.settings.is_cache_enabled:
            return None
        try:
            return Store(self._directory or open_directory(self.settings))
        except CacheDirectoryError as error:
            if self.settings.cache_dir:
                raise
            self.notices.add(f"kernels are not kept between runs: {error}")
            return None


_current: Runtime | None = None
_lock = threading.Lock()


def get_runtime() -> Runtime:
    """This process's runtime."""
    global _current
    if _current is None:
        with _lock:
            if _current is None:
                _current = Runtime(settings_module.resolve())
    return _current


def replace_runtime(runtime: Runtime | None) -> Runtime | None:
    """Put `runtime` in force and return what was before; None makes the next call start from the environment."""
    global _current
    with _lock:
        before, _current = _current, runtime
    return before


os.register_at_fork(after_in_child=lambda: globals().update(_lock=threading.Lock()))
