"""What travels between the asking process, the pool and a compile process."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from pytest_quack.settings import Settings


class KeyState(enum.Enum):
    """What the pool knows of a key."""

    NEW = "new"
    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


class FailureKind(enum.Enum):
    """Why a key has no artifact.

    RAISED: the compile function raised. REFUSED: the compile process does not see the same function, sources or
    environment. CRASHED, TIMED_OUT: the process died or hung. POOL: there is no pool any more.
    """

    RAISED = "raised"
    REFUSED = "refused"
    CRASHED = "crashed"
    TIMED_OUT = "timed out"
    POOL = "pool"


@dataclass(frozen=True, slots=True)
class Imports:
    """What the server imports before it forks compile processes, for one asking process or for several.

    Attributes:
        sys_path: where modules are found.
        pinned: variables that compile processes have of their own; known only when the asking process has imported
            the compiler.
        backends, modules: what is imported, in this order.
    """

    sys_path: tuple[str, ...]
    pinned: dict[str, str]
    backends: tuple[str, ...]
    modules: tuple[str, ...]

    def merged(self, other: Imports) -> Imports:
        """What both need: this one's first, and of a variable that both have the other's."""
        return Imports(
            (*dict.fromkeys((*self.sys_path, *other.sys_path)),),
            {**self.pinned, **other.pinned},
            (*dict.fromkeys((*self.backends, *other.backends)),),
            (*dict.fromkeys((*self.modules, *other.modules)),),
        )


@dataclass(frozen=True, slots=True)
class Asker:
    """What a job carries of the process that asks.

    Attributes:
        cwd: the working directory.
        environ: variables in which it differs from the pool's processes; None means unset.
        settings: those in force.
        store_root: the cache directory's root; empty where nothing is stored, and the artifact travels back.
    """

    cwd: str
    environ: dict[str, str | None]
    settings: Settings
    store_root: str


@dataclass(frozen=True, slots=True)
class CompileJob:
    """One key to compile: everything a fresh process needs.

    Attributes:
        key: the direct key; the compile process computes its own and refuses the job if they differ.
        parts: digests of the labelled parts of the key, to say which of them differs.
        module, qualname, file: where the compile function is.
        arguments: pickled (args, kwargs).
        asker: the process that asks.
        description: for people.
    """

    key: str
    parts: dict[str, str] = field(repr=False)
    module: str
    qualname: str
    file: str
    arguments: bytes = field(repr=False)
    asker: Asker = field(repr=False)
    description: str


@dataclass(frozen=True, slots=True)
class TracedJob:
    """One traced function to compile.

    Attributes:
        key: the content key.
        backend: the name of the backend that took the trace.
        payload: the trace, as that backend writes it.
        asker, description: as in `CompileJob`.
    """

    key: str
    backend: str
    payload: bytes = field(repr=False)
    asker: Asker = field(repr=False)
    description: str


@dataclass(frozen=True, slots=True)
class CheckJob:
    """A backend's self-check of its interception.

    Attributes:
        key: what the check depends on.
        backend, asker, description: as in `TracedJob`.
    """

    key: str
    backend: str
    asker: Asker = field(repr=False)
    description: str


Job = CompileJob | TracedJob | CheckJob


@dataclass(frozen=True, slots=True)
class CompileFailure:
    """Why a key could not be compiled in the pool."""

    kind: FailureKind
    message: str
    details: str = ""


@dataclass(frozen=True, slots=True)
class CompileResult:
    """What a compile process answers.

    Attributes:
        failure: None where the artifact is stored, or in `artifact`.
        compile_s: how long the compile took; 0 where another process had already made it.
        artifact: the artifact itself, where it could not be stored.
        environ: variables that it read besides those of its key, as in `cache.store.Pointer`.
    """

    key: str
    failure: CompileFailure | None
    compile_s: float = 0.0
    artifact: Any = field(default=None, repr=False)
    environ: dict[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Counts of one pool's life so far.

    Attributes:
        submitted: keys that were given to the pool; self-checks are no keys.
        done, failed: of these, how many ended which way.
        pending: how many are queued or running.
        compiled: how many of `done` were really compiled here, the rest were found made.
        workers_started, workers_crashed: compile processes.
        slowest: (seconds, description), the longest first, at most 10.
        failures: key -> (description, why), in the order they happened.
    """

    submitted: int
    done: int
    failed: int
    pending: int
    compiled: int
    workers_started: int
    workers_crashed: int
    slowest: tuple[tuple[float, str], ...]
    failures: dict[str, tuple[str, CompileFailure]]
