"""What the process that asks sees of a compile pool.

That is `CompilePool` where the pool is in this process, and `PoolClient` where it is in another one.
"""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable
from typing import Final

from pytest_quack.backends import find_backend
from pytest_quack.compile import preload
from pytest_quack.compile.job import Asker, CompileFailure, CompileResult, Imports, Job, KeyState, PoolStats
from pytest_quack.errors import CompilePending
from pytest_quack.runtime import Runtime

# No device to see, and torch looks for devices through NVML, which needs no driver that is initialised.
GPU_BLIND: Final = {"CUDA_VISIBLE_DEVICES": "", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
# Variables that differ between processes without changing what is compiled.
_NOT_SHIPPED: Final = frozenset(
    {
        *GPU_BLIND,
        "CUDA_DEVICE_ORDER",
        "NVIDIA_VISIBLE_DEVICES",
        "PYTEST_CURRENT_TEST",
        "PYTEST_XDIST_TESTRUNUID",
        "PYTEST_XDIST_WORKER",
        "PYTEST_XDIST_WORKER_COUNT",
        "QUACK_RUN_GPUS",
        "_",
    }
)

PendingPolicy = Callable[[str, str], None]


class AskingSide(ABC):
    """A pool as those who need kernels use it. Safe to use from several threads of the process that made it.

    Attributes:
        owner_pid: the process that may use this object.
        jobs: how many compile processes there are at most.
        pending_policy: what happens to a call whose key is pending, instead of CompilePending.
    """

    def __init__(self, jobs: int, environ: dict[str, str]) -> None:
        """Take the pool's size, and the environment of its processes."""
        self.owner_pid: Final = os.getpid()
        self.jobs: Final = jobs
        self.pending_policy: PendingPolicy | None = None
        self._environ = environ
        self._pinned: dict[str, str] = {}  # variables that compile processes have of their own

    @abstractmethod
    def poll(self, key: str) -> tuple[KeyState, CompileFailure | None]:
        """The key's state, and why it failed if it did."""

    @abstractmethod
    def pending(self, keys: Collection[str]) -> set[str]:
        """Those of the keys that are pending."""

    @abstractmethod
    def submit(self, job: Job) -> KeyState:
        """Have a job's key compiled, unless it was submitted before. Returns the key's state."""

    @abstractmethod
    def wait_any(
        self, keys: Iterable[str], timeout_s: float | None = None, until: Callable[[], bool] | None = None
    ) -> tuple[str, ...]:
        """Wait until at least one of `keys` is no longer pending; returns those, none after `timeout_s` seconds.

        Of no keys there is nothing to wait for: it returns at once. It also returns when `until` says so, which is
        asked at the start and after each `nudge`.
        """

    @abstractmethod
    def nudge(self) -> None:
        """Have those who wait with `until` ask it again. May be called from any thread."""

    @abstractmethod
    def add_waiter(self, key: str) -> None:
        """Say that one more test cannot go on without this key: it is compiled before those that nobody waits for."""

    @abstractmethod
    def result(self, key: str) -> CompileResult | None:
        """What the compile process answered for a done key: with the artifact, where that could not be stored."""

    @abstractmethod
    def stats(self) -> PoolStats:
        """Counts so far, of all who use the pool."""

    @property
    @abstractmethod
    def settled(self) -> int:
        """How many keys have stopped being pending so far: a cheap way to see that something has changed."""

    @property
    @abstractmethod
    def is_started(self) -> bool:
        """Whether this process has made the pool do something."""

    @abstractmethod
    def prewarm(self) -> None:
        """Start importing in the server now, so that the first miss does not have to wait for it.

        May be called again when more has been imported here.
        """

    @abstractmethod
    def adopt_environ(self) -> None:
        """Take this process's environment, as it is now, for that of the compile processes, if they are its own."""

    @abstractmethod
    def shutdown(self) -> None:
        """Give up the pool: one of this process ends every process at once, and what is pending fails."""

    def wait(self, key: str, timeout_s: float | None = None) -> KeyState:
        """Wait until a key is no longer pending, at most `timeout_s` seconds; returns its state then."""
        self.wait_any([key], timeout_s)
        return self.poll(key)[0]

    def await_or_raise(self, key: str, description: str) -> None:
        """What happens to a call whose key is pending: it waits here, or CompilePending tells it to come back."""
        if self.pending_policy is None:
            raise CompilePending(key, description)
        self.pending_policy(key, description)

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

    def _pin(self) -> None:
        for name in preload.registered_backends():
            self._pinned.update(find_backend(name).worker_environ())

    def _imports(self) -> Imports:
        """What compile processes need to have imported for this process's keys, as far as it knows now."""
        backends, modules = preload.what_to_import()
        return Imports(tuple(sys.path), dict(self._pinned), backends, modules)
