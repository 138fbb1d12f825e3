"""Modules that hold compile functions, so that compile processes can be forked from one that has imported them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Final

from pytest_quack.backends import DEFAULT, find_backend

# module name -> backend name, in the order in which the modules were imported
_registered: Final[dict[str, str]] = {}
# backends whose compiles are intercepted, wherever they are
_intercepted: Final[set[str]] = set()


def register(module: str, backend_name: str) -> None:
    """Note that `module` defines a compile function for that backend."""
    _registered.setdefault(module, backend_name)


def register_interception(backend_name: str) -> None:
    """Note that traces of that backend may be compiled."""
    _intercepted.add(backend_name)


def registered_backends() -> tuple[str, ...]:
    return tuple(dict.fromkeys([*_registered.values(), *sorted(_intercepted)]))


def preloadable_modules() -> tuple[str, ...]:
    """Registered modules that a fresh process can import by name without running tests' own code.

    Test modules and conftest files are left to the jobs that need them: importing them may do anything.
    """
    return tuple(name for name in _registered if _is_preloadable(name))


def heralds() -> frozenset[str]:
    """Packages whose import says that kernels are about to be needed."""
    return find_backend(DEFAULT).heralds()


def what_to_import() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The backends that compile functions use, and the modules that compile processes need, in this order.

    Before any compile function is known, those of the default backend.
    """
    backends = registered_backends() or (DEFAULT,)
    shared = [name for backend in backends for name in find_backend(backend).worker_preload()]
    present = [name for name in shared if importlib.util.find_spec(name.split(".")[0]) is not None]
    return backends, (*dict.fromkeys([*present, *preloadable_modules()]),)


class _Watch(MetaPathFinder):
    """Calls `act` once when one of `names` is imported; at once where it has been already."""

    def __init__(self, names: frozenset[str], act: Callable[[], None]) -> None:
        self._names = names
        self._act = act

    def install(self) -> None:
        if self._names & sys.modules.keys():
            self._act()
        else:
            sys.meta_path.insert(0, self)

    def remove(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)


class ImportWatch(_Watch):
    """Acts once, when this process begins to import one of the packages.

    A compiler takes seconds to import. A server started at that moment is ready when the first test asks for a kernel.
    """

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        """Finds nothing: only looks at the name."""
        if fullname in self._names:
            self.remove()
            self._act()


class AfterImport(_Watch):
    """Acts once, when this process has imported one of the modules."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """What the other finders find, with a loader that acts when it is through."""
        if fullname not in self._names:
            return None
        self.remove()
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            loader, execute = spec.loader, spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self._act()

            loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _is_preloadable(name: str) -> bool:
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    if module is None or spec is None or name == "__main__":
        return False
    is_rewritten_test = type(spec.loader).__module__.startswith("_pytest.")
    last = name.rpartition(".")[2]
    return not is_rewritten_test and last != "conftest" and not last.startswith("test_")
