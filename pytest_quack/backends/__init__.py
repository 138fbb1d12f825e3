"""The adapter to a JIT compiler: the only code that knows a compiler's internals.

A backend is named by a short built-in name, or by "package.module:attribute" for one that lives elsewhere, so that a
compile process can find it again.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any, Final, Protocol

from pytest_quack.cache.store import Artifact
from pytest_quack.errors import SettingsError

DEFAULT: Final = "cute_dsl"
_BUILT_IN: Final = {"cute_dsl": "pytest_quack.backends.cute_dsl:BACKEND"}
# When this module has been imported, compiles of the default backend can be intercepted, and not before.
INTERCEPTED_MODULE: Final = "cutlass.cutlass_dsl.cutlass"


@dataclass(frozen=True, slots=True)
class Target:
    """What code is made for.

    Attributes:
        arch: the GPU architecture, such as "sm_90a"; empty where nothing says which.
        host_machine: the CPU family, such as "x86_64".
        host_features: the CPU features that compiled host code may use, sorted.
    """

    arch: str
    host_machine: str
    host_features: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Exported:
    """A compiled kernel as bytes.

    Attributes:
        abi: how to call it.
        arch: what its device code needs; empty where it has none.
        content_key: that of its trace, where one was taken.
        extra: what the backend must know to use it, besides its bytes.
    """

    payload: bytes = field(repr=False)
    abi: str
    arch: str
    content_key: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)


class Interception(Protocol):
    """A backend's compiles, taken where they happen."""

    def install(self) -> None:
        """Begin. A compiler that is not as expected is left alone, with a notice."""

    def remove(self) -> None:
        """Leave the compiler as it was."""


@dataclass(frozen=True, slots=True)
class CompileHere:
    """The compiler is to make it in this process.

    Attributes:
        reason: why not the pool, where there is one.
        is_for_export: nobody calls it here, so that it need not be made ready to run.
    """

    reason: str = ""
    is_for_export: bool = False


class Resolver(Protocol):
    """Says what to do with a traced function: see `pytest_quack.cache.traced.TraceCache`."""

    def resolve(self, content_key: str, description: str, dump: Callable[[], bytes]) -> Artifact | CompileHere:
        """Raises InterceptionError where nothing may be taken from elsewhere in this run."""

    def made_here(
        self, content_key: str, description: str, why: CompileHere, seconds: float, export: Callable[[], Exported]
    ) -> None:
        """Called when the compiler has made it in this process after all."""

    def discard(self, content_key: str, error: Exception) -> None:
        """Called when an artifact could not be loaded, though the compiler's own object could."""


class Backend(Protocol):
    """What the rest of the project asks of a compiler."""

    name: str

    def toolchain(self) -> Mapping[str, str]:
        """Versions of everything that shapes the output, the same on every machine that has the same."""

    def options(self) -> str:
        """Settings in force in this process that change the output, as one canonical text."""

    def target(self) -> Target:
        """What this process compiles for."""

    def export(self, compiled: Any) -> Exported:
        """Raises ExportError where `compiled` is nothing that can be exported, TargetArchError without an arch."""

    def load(self, artifact: Artifact) -> Callable[..., Any]:
        """A callable kernel. Raises ArtifactError where it cannot be loaded here."""

    def interception(self, resolver: Resolver, notice: Callable[[str], None]) -> Interception | None:
        """The compiles of this process, to be asked about; None where this compiler cannot be intercepted."""

    def lower(self, payload: bytes, content_key: str) -> Exported:
        """Compile a trace that an interception has taken. Raises what the compiler raises."""

    def check_interception(self) -> Exported:
        """Take a small function through the whole path of an interception, and compare what it computes.

        Returns its object. Raises RuntimeError saying what is not as it should be, and whatever the compiler raises.
        Called in a compile process, once for each version of the compiler.
        """

    def worker_environ(self) -> Mapping[str, str]:
        """Variables that make a fresh process compile as this one does."""

    def prepare_worker(self) -> None:
        """Called in the process that compile processes are forked from, before it imports anything else.

        What it imports must not initialise a GPU driver: a driver that was initialised does not survive a fork.
        """

    def pin_worker(self, pinned: Mapping[str, str]) -> None:
        """Called in that process with the asking process's `worker_environ`, after imports.

        The asking process may know these only when the other one has imported the compiler already.
        """

    def worker_preload(self) -> tuple[str, ...]:
        """Modules that every compile needs, imported once before compile processes are forked."""

    def heralds(self) -> frozenset[str]:
        """Packages whose import in the asking process says that kernels are about to be needed."""


def source_code(function: FunctionType) -> CodeType:
    """The code that the author of a function wrote: the CuTe DSL rewrites a function in place when it compiles it."""
    original = function.__dict__.get("_original_code")
    return original if isinstance(original, CodeType) else function.__code__


@functools.cache
def find_backend(name: str) -> Backend:
    """The backend of that name. Raises SettingsError naming those there are."""
    path = _BUILT_IN.get(name, name)
    module, _, attribute = path.partition(":")
    if not attribute:
        choices = ", ".join(sorted(_BUILT_IN))
        raise SettingsError(f'there is no backend "{name}"; use one of {choices}, or "package.module:attribute".')
    backend: Backend = getattr(importlib.import_module(module), attribute)
    return backend
